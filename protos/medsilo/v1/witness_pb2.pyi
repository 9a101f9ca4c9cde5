from medsilo.protos.medsilo.v1 import exposure_pb2 as _exposure_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class AddCheckpoint(_message.Message):
    __slots__ = ("old_size", "consistency", "checkpoint")
    OLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    old_size: bytes
    consistency: bytes
    checkpoint: bytes
    def __init__(self, old_size: _Optional[bytes] = ..., consistency: _Optional[bytes] = ..., checkpoint: _Optional[bytes] = ...) -> None: ...
