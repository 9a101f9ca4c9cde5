from medsilo.protos.medsilo.v1 import exposure_pb2 as _exposure_pb2
from medsilo.protos.medsilo.v1 import journal_pb2 as _journal_pb2
from medsilo.protos.medsilo.v1 import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnrolRequest(_message.Message):
    __slots__ = ("nonce", "silo", "protocol_version", "certificate_request", "statement", "rotations")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SILO_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    ROTATIONS_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    silo: str
    protocol_version: int
    certificate_request: bytes
    statement: _journal_pb2.Envelope
    rotations: _containers.RepeatedCompositeFieldContainer[_journal_pb2.Envelope]
    def __init__(self, nonce: _Optional[bytes] = ..., silo: _Optional[str] = ..., protocol_version: _Optional[int] = ..., certificate_request: _Optional[bytes] = ..., statement: _Optional[_Union[_journal_pb2.Envelope, _Mapping]] = ..., rotations: _Optional[_Iterable[_Union[_journal_pb2.Envelope, _Mapping]]] = ...) -> None: ...

class EnrolResponse(_message.Message):
    __slots__ = ("nonce", "certificate", "coordinator_certificate", "coordinator_audit_key", "rotations", "plan", "time_ms", "protocol_version")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_AUDIT_KEY_FIELD_NUMBER: _ClassVar[int]
    ROTATIONS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    certificate: bytes
    coordinator_certificate: bytes
    coordinator_audit_key: bytes
    rotations: _containers.RepeatedCompositeFieldContainer[_journal_pb2.Envelope]
    plan: _plan_pb2.RunPlan
    time_ms: int
    protocol_version: int
    def __init__(self, nonce: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., coordinator_certificate: _Optional[bytes] = ..., coordinator_audit_key: _Optional[bytes] = ..., rotations: _Optional[_Iterable[_Union[_journal_pb2.Envelope, _Mapping]]] = ..., plan: _Optional[_Union[_plan_pb2.RunPlan, _Mapping]] = ..., time_ms: _Optional[int] = ..., protocol_version: _Optional[int] = ...) -> None: ...
