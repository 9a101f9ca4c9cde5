from medsilo.protos.medsilo.v1 import exposure_pb2 as _exposure_pb2
from medsilo.protos.medsilo.v1 import journal_pb2 as _journal_pb2
from medsilo.protos.medsilo.v1 import plan_pb2 as _plan_pb2
from medsilo.protos.medsilo.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TaskKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_KIND_UNSPECIFIED: _ClassVar[TaskKind]
    TASK_KIND_WAIT: _ClassVar[TaskKind]
    TASK_KIND_TRAIN: _ClassVar[TaskKind]
    TASK_KIND_FINISH: _ClassVar[TaskKind]
    TASK_KIND_MASK: _ClassVar[TaskKind]

class EndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_REASON_UNSPECIFIED: _ClassVar[EndReason]
    END_REASON_WITHDRAWN: _ClassVar[EndReason]
    END_REASON_TOO_FEW_FOR_MASKS: _ClassVar[EndReason]
    END_REASON_WITHDRAWN_FROM_MASKS: _ClassVar[EndReason]
TASK_KIND_UNSPECIFIED: TaskKind
TASK_KIND_WAIT: TaskKind
TASK_KIND_TRAIN: TaskKind
TASK_KIND_FINISH: TaskKind
TASK_KIND_MASK: TaskKind
END_REASON_UNSPECIFIED: EndReason
END_REASON_WITHDRAWN: EndReason
END_REASON_TOO_FEW_FOR_MASKS: EndReason
END_REASON_WITHDRAWN_FROM_MASKS: EndReason

class GetPlanRequest(_message.Message):
    __slots__ = ("nonce", "silo", "protocol_version")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SILO_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    silo: str
    protocol_version: int
    def __init__(self, nonce: _Optional[bytes] = ..., silo: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class GetPlanResponse(_message.Message):
    __slots__ = ("nonce", "plan", "coordinator_certificate", "coordinator_audit_key", "rotations", "time_ms", "protocol_version")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_AUDIT_KEY_FIELD_NUMBER: _ClassVar[int]
    ROTATIONS_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    plan: _plan_pb2.RunPlan
    coordinator_certificate: bytes
    coordinator_audit_key: bytes
    rotations: _containers.RepeatedCompositeFieldContainer[_journal_pb2.Envelope]
    time_ms: int
    protocol_version: int
    def __init__(self, nonce: _Optional[bytes] = ..., plan: _Optional[_Union[_plan_pb2.RunPlan, _Mapping]] = ..., coordinator_certificate: _Optional[bytes] = ..., coordinator_audit_key: _Optional[bytes] = ..., rotations: _Optional[_Iterable[_Union[_journal_pb2.Envelope, _Mapping]]] = ..., time_ms: _Optional[int] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("nonce", "silo", "plan_sha256", "audit_key", "accepted", "missing_classes", "missing_method", "missing_rounds", "rotations", "seen", "synthetic", "missing_privacy", "missing_masks", "protocol_version")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SILO_FIELD_NUMBER: _ClassVar[int]
    PLAN_SHA256_FIELD_NUMBER: _ClassVar[int]
    AUDIT_KEY_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MISSING_CLASSES_FIELD_NUMBER: _ClassVar[int]
    MISSING_METHOD_FIELD_NUMBER: _ClassVar[int]
    MISSING_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ROTATIONS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_FIELD_NUMBER: _ClassVar[int]
    MISSING_PRIVACY_FIELD_NUMBER: _ClassVar[int]
    MISSING_MASKS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    silo: str
    plan_sha256: bytes
    audit_key: bytes
    accepted: bool
    missing_classes: _containers.RepeatedScalarFieldContainer[_exposure_pb2.ExposureClass]
    missing_method: bool
    missing_rounds: bool
    rotations: _containers.RepeatedCompositeFieldContainer[_journal_pb2.Envelope]
    seen: int
    synthetic: bool
    missing_privacy: bool
    missing_masks: bool
    protocol_version: int
    def __init__(self, nonce: _Optional[bytes] = ..., silo: _Optional[str] = ..., plan_sha256: _Optional[bytes] = ..., audit_key: _Optional[bytes] = ..., accepted: _Optional[bool] = ..., missing_classes: _Optional[_Iterable[_Union[_exposure_pb2.ExposureClass, str]]] = ..., missing_method: _Optional[bool] = ..., missing_rounds: _Optional[bool] = ..., rotations: _Optional[_Iterable[_Union[_journal_pb2.Envelope, _Mapping]]] = ..., seen: _Optional[int] = ..., synthetic: _Optional[bool] = ..., missing_privacy: _Optional[bool] = ..., missing_masks: _Optional[bool] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("nonce", "round", "attestation")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTESTATION_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    round: int
    attestation: _journal_pb2.Envelope
    def __init__(self, nonce: _Optional[bytes] = ..., round: _Optional[int] = ..., attestation: _Optional[_Union[_journal_pb2.Envelope, _Mapping]] = ...) -> None: ...

class WithdrawRequest(_message.Message):
    __slots__ = ("nonce", "silo", "plan_sha256", "statement", "seen", "protocol_version")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SILO_FIELD_NUMBER: _ClassVar[int]
    PLAN_SHA256_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    silo: str
    plan_sha256: bytes
    statement: _journal_pb2.Envelope
    seen: int
    protocol_version: int
    def __init__(self, nonce: _Optional[bytes] = ..., silo: _Optional[str] = ..., plan_sha256: _Optional[bytes] = ..., statement: _Optional[_Union[_journal_pb2.Envelope, _Mapping]] = ..., seen: _Optional[int] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class WithdrawResponse(_message.Message):
    __slots__ = ("nonce", "attestation")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ATTESTATION_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    attestation: _journal_pb2.Envelope
    def __init__(self, nonce: _Optional[bytes] = ..., attestation: _Optional[_Union[_journal_pb2.Envelope, _Mapping]] = ...) -> None: ...

class GetTaskRequest(_message.Message):
    __slots__ = ("nonce", "silo", "plan_sha256", "wait_seconds", "holds_model", "attestation", "mask_key", "protocol_version")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SILO_FIELD_NUMBER: _ClassVar[int]
    PLAN_SHA256_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_MODEL_FIELD_NUMBER: _ClassVar[int]
    ATTESTATION_FIELD_NUMBER: _ClassVar[int]
    MASK_KEY_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    silo: str
    plan_sha256: bytes
    wait_seconds: int
    holds_model: bool
    attestation: _journal_pb2.Envelope
    mask_key: _journal_pb2.MaskKey
    protocol_version: int
    def __init__(self, nonce: _Optional[bytes] = ..., silo: _Optional[str] = ..., plan_sha256: _Optional[bytes] = ..., wait_seconds: _Optional[int] = ..., holds_model: _Optional[bool] = ..., attestation: _Optional[_Union[_journal_pb2.Envelope, _Mapping]] = ..., mask_key: _Optional[_Union[_journal_pb2.MaskKey, _Mapping]] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("nonce", "kind", "round", "parts", "attestation", "roster", "end_reason", "rounds_done")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ATTESTATION_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    END_REASON_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_DONE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    kind: TaskKind
    round: int
    parts: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.PartManifest]
    attestation: _journal_pb2.Envelope
    roster: _containers.RepeatedCompositeFieldContainer[_journal_pb2.MaskKey]
    end_reason: EndReason
    rounds_done: int
    def __init__(self, nonce: _Optional[bytes] = ..., kind: _Optional[_Union[TaskKind, str]] = ..., round: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[_tensor_pb2.PartManifest, _Mapping]]] = ..., attestation: _Optional[_Union[_journal_pb2.Envelope, _Mapping]] = ..., roster: _Optional[_Iterable[_Union[_journal_pb2.MaskKey, _Mapping]]] = ..., end_reason: _Optional[_Union[EndReason, str]] = ..., rounds_done: _Optional[int] = ...) -> None: ...

class GetTaskResponse(_message.Message):
    __slots__ = ("task", "chunk")
    TASK_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    task: Task
    chunk: _tensor_pb2.TensorChunk
    def __init__(self, task: _Optional[_Union[Task, _Mapping]] = ..., chunk: _Optional[_Union[_tensor_pb2.TensorChunk, _Mapping]] = ...) -> None: ...

class Update(_message.Message):
    __slots__ = ("nonce", "silo", "plan_sha256", "round", "parts", "attestation", "roster_sha256", "protocol_version")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SILO_FIELD_NUMBER: _ClassVar[int]
    PLAN_SHA256_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ATTESTATION_FIELD_NUMBER: _ClassVar[int]
    ROSTER_SHA256_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    silo: str
    plan_sha256: bytes
    round: int
    parts: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.PartManifest]
    attestation: _journal_pb2.Envelope
    roster_sha256: bytes
    protocol_version: int
    def __init__(self, nonce: _Optional[bytes] = ..., silo: _Optional[str] = ..., plan_sha256: _Optional[bytes] = ..., round: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[_tensor_pb2.PartManifest, _Mapping]]] = ..., attestation: _Optional[_Union[_journal_pb2.Envelope, _Mapping]] = ..., roster_sha256: _Optional[bytes] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class SubmitUpdateRequest(_message.Message):
    __slots__ = ("update", "chunk")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    update: Update
    chunk: _tensor_pb2.TensorChunk
    def __init__(self, update: _Optional[_Union[Update, _Mapping]] = ..., chunk: _Optional[_Union[_tensor_pb2.TensorChunk, _Mapping]] = ...) -> None: ...

class SubmitUpdateResponse(_message.Message):
    __slots__ = ("nonce", "attestation", "repeated", "first")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ATTESTATION_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    attestation: _journal_pb2.Envelope
    repeated: bool
    first: _journal_pb2.Envelope
    def __init__(self, nonce: _Optional[bytes] = ..., attestation: _Optional[_Union[_journal_pb2.Envelope, _Mapping]] = ..., repeated: _Optional[bool] = ..., first: _Optional[_Union[_journal_pb2.Envelope, _Mapping]] = ...) -> None: ...

class AttestRequest(_message.Message):
    __slots__ = ("nonce", "silo", "plan_sha256", "seen", "attestation", "protocol_version")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SILO_FIELD_NUMBER: _ClassVar[int]
    PLAN_SHA256_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    ATTESTATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    silo: str
    plan_sha256: bytes
    seen: int
    attestation: _journal_pb2.Envelope
    protocol_version: int
    def __init__(self, nonce: _Optional[bytes] = ..., silo: _Optional[str] = ..., plan_sha256: _Optional[bytes] = ..., seen: _Optional[int] = ..., attestation: _Optional[_Union[_journal_pb2.Envelope, _Mapping]] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class AttestResponse(_message.Message):
    __slots__ = ("nonce", "attestation")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ATTESTATION_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    attestation: _journal_pb2.Envelope
    def __init__(self, nonce: _Optional[bytes] = ..., attestation: _Optional[_Union[_journal_pb2.Envelope, _Mapping]] = ...) -> None: ...
