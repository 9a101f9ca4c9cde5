from medsilo.protos.medsilo.v1 import exposure_pb2 as _exposure_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class PartManifest(_message.Message):
    __slots__ = ("exposure_class", "tensors")
    EXPOSURE_CLASS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    exposure_class: _exposure_pb2.ExposureClass
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    def __init__(self, exposure_class: _Optional[_Union[_exposure_pb2.ExposureClass, str]] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ...) -> None: ...

class TensorChunk(_message.Message):
    __slots__ = ("nonce", "initial_model", "model_parameters_extractor", "model_parameters_classifier", "running_statistics", "classifier_gradient", "data_identifier", "prototypes", "sample_count", "label_counts", "local_metrics", "derived_accuracy", "peer_derived", "model_gradient", "parameter_mask", "peer_ratings", "peer_models", "public_data", "masked_update", "peer_initial_model", "feature_moments", "sealed_model", "model_distances", "opening_shares", "mixing_weights", "sealed_mixture")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_PARAMETERS_EXTRACTOR_FIELD_NUMBER: _ClassVar[int]
    MODEL_PARAMETERS_CLASSIFIER_FIELD_NUMBER: _ClassVar[int]
    RUNNING_STATISTICS_FIELD_NUMBER: _ClassVar[int]
    CLASSIFIER_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    DATA_IDENTIFIER_FIELD_NUMBER: _ClassVar[int]
    PROTOTYPES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LABEL_COUNTS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_METRICS_FIELD_NUMBER: _ClassVar[int]
    DERIVED_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    PEER_DERIVED_FIELD_NUMBER: _ClassVar[int]
    MODEL_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_MASK_FIELD_NUMBER: _ClassVar[int]
    PEER_RATINGS_FIELD_NUMBER: _ClassVar[int]
    PEER_MODELS_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_DATA_FIELD_NUMBER: _ClassVar[int]
    MASKED_UPDATE_FIELD_NUMBER: _ClassVar[int]
    PEER_INITIAL_MODEL_FIELD_NUMBER: _ClassVar[int]
    FEATURE_MOMENTS_FIELD_NUMBER: _ClassVar[int]
    SEALED_MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DISTANCES_FIELD_NUMBER: _ClassVar[int]
    OPENING_SHARES_FIELD_NUMBER: _ClassVar[int]
    MIXING_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SEALED_MIXTURE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    initial_model: bytes
    model_parameters_extractor: bytes
    model_parameters_classifier: bytes
    running_statistics: bytes
    classifier_gradient: bytes
    data_identifier: bytes
    prototypes: bytes
    sample_count: bytes
    label_counts: bytes
    local_metrics: bytes
    derived_accuracy: bytes
    peer_derived: bytes
    model_gradient: bytes
    parameter_mask: bytes
    peer_ratings: bytes
    peer_models: bytes
    public_data: bytes
    masked_update: bytes
    peer_initial_model: bytes
    feature_moments: bytes
    sealed_model: bytes
    model_distances: bytes
    opening_shares: bytes
    mixing_weights: bytes
    sealed_mixture: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., initial_model: _Optional[bytes] = ..., model_parameters_extractor: _Optional[bytes] = ..., model_parameters_classifier: _Optional[bytes] = ..., running_statistics: _Optional[bytes] = ..., classifier_gradient: _Optional[bytes] = ..., data_identifier: _Optional[bytes] = ..., prototypes: _Optional[bytes] = ..., sample_count: _Optional[bytes] = ..., label_counts: _Optional[bytes] = ..., local_metrics: _Optional[bytes] = ..., derived_accuracy: _Optional[bytes] = ..., peer_derived: _Optional[bytes] = ..., model_gradient: _Optional[bytes] = ..., parameter_mask: _Optional[bytes] = ..., peer_ratings: _Optional[bytes] = ..., peer_models: _Optional[bytes] = ..., public_data: _Optional[bytes] = ..., masked_update: _Optional[bytes] = ..., peer_initial_model: _Optional[bytes] = ..., feature_moments: _Optional[bytes] = ..., sealed_model: _Optional[bytes] = ..., model_distances: _Optional[bytes] = ..., opening_shares: _Optional[bytes] = ..., mixing_weights: _Optional[bytes] = ..., sealed_mixture: _Optional[bytes] = ...) -> None: ...
