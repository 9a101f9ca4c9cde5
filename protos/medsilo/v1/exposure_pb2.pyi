from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class ExposureClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPOSURE_CLASS_UNSPECIFIED: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_PROTOCOL: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_IDENTITY: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_INITIAL_MODEL: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_MODEL_PARAMETERS_EXTRACTOR: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_MODEL_PARAMETERS_CLASSIFIER: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_RUNNING_STATISTICS: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_CLASSIFIER_GRADIENT: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_DATA_IDENTIFIER: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_PROTOTYPES: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_SAMPLE_COUNT: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_LABEL_COUNTS: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_LOCAL_METRICS: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_DERIVED_ACCURACY: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_PEER_DERIVED: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_MODEL_GRADIENT: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_PARAMETER_MASK: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_PEER_RATINGS: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_PEER_MODELS: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_PUBLIC_DATA: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_MASKED_UPDATE: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_PEER_INITIAL_MODEL: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_FEATURE_MOMENTS: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_SEALED_MODEL: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_MODEL_DISTANCES: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_OPENING_SHARES: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_MIXING_WEIGHTS: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_SEALED_MIXTURE: _ClassVar[ExposureClass]
    EXPOSURE_CLASS_CHECKPOINT: _ClassVar[ExposureClass]
EXPOSURE_CLASS_UNSPECIFIED: ExposureClass
EXPOSURE_CLASS_PROTOCOL: ExposureClass
EXPOSURE_CLASS_IDENTITY: ExposureClass
EXPOSURE_CLASS_INITIAL_MODEL: ExposureClass
EXPOSURE_CLASS_MODEL_PARAMETERS_EXTRACTOR: ExposureClass
EXPOSURE_CLASS_MODEL_PARAMETERS_CLASSIFIER: ExposureClass
EXPOSURE_CLASS_RUNNING_STATISTICS: ExposureClass
EXPOSURE_CLASS_CLASSIFIER_GRADIENT: ExposureClass
EXPOSURE_CLASS_DATA_IDENTIFIER: ExposureClass
EXPOSURE_CLASS_PROTOTYPES: ExposureClass
EXPOSURE_CLASS_SAMPLE_COUNT: ExposureClass
EXPOSURE_CLASS_LABEL_COUNTS: ExposureClass
EXPOSURE_CLASS_LOCAL_METRICS: ExposureClass
EXPOSURE_CLASS_DERIVED_ACCURACY: ExposureClass
EXPOSURE_CLASS_PEER_DERIVED: ExposureClass
EXPOSURE_CLASS_MODEL_GRADIENT: ExposureClass
EXPOSURE_CLASS_PARAMETER_MASK: ExposureClass
EXPOSURE_CLASS_PEER_RATINGS: ExposureClass
EXPOSURE_CLASS_PEER_MODELS: ExposureClass
EXPOSURE_CLASS_PUBLIC_DATA: ExposureClass
EXPOSURE_CLASS_MASKED_UPDATE: ExposureClass
EXPOSURE_CLASS_PEER_INITIAL_MODEL: ExposureClass
EXPOSURE_CLASS_FEATURE_MOMENTS: ExposureClass
EXPOSURE_CLASS_SEALED_MODEL: ExposureClass
EXPOSURE_CLASS_MODEL_DISTANCES: ExposureClass
EXPOSURE_CLASS_OPENING_SHARES: ExposureClass
EXPOSURE_CLASS_MIXING_WEIGHTS: ExposureClass
EXPOSURE_CLASS_SEALED_MIXTURE: ExposureClass
EXPOSURE_CLASS_CHECKPOINT: ExposureClass
EXPOSURE_FIELD_NUMBER: _ClassVar[int]
exposure: _descriptor.FieldDescriptor
SINCE_FIELD_NUMBER: _ClassVar[int]
since: _descriptor.FieldDescriptor
ESSENTIAL_FIELD_NUMBER: _ClassVar[int]
essential: _descriptor.FieldDescriptor
VALUE_SINCE_FIELD_NUMBER: _ClassVar[int]
value_since: _descriptor.FieldDescriptor
CALL_SINCE_FIELD_NUMBER: _ClassVar[int]
call_since: _descriptor.FieldDescriptor
