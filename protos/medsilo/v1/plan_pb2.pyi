from medsilo.protos.medsilo.v1 import exposure_pb2 as _exposure_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunPlan(_message.Message):
    __slots__ = ("federation", "coordinator", "run", "method", "model", "training", "rounds", "seed", "required", "optional", "downlink", "participation", "privacy", "secure_aggregation")
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    OPTIONAL_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_FIELD_NUMBER: _ClassVar[int]
    PARTICIPATION_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_FIELD_NUMBER: _ClassVar[int]
    SECURE_AGGREGATION_FIELD_NUMBER: _ClassVar[int]
    federation: str
    coordinator: str
    run: str
    method: Method
    model: Model
    training: Training
    rounds: int
    seed: int
    required: _containers.RepeatedScalarFieldContainer[_exposure_pb2.ExposureClass]
    optional: _containers.RepeatedScalarFieldContainer[_exposure_pb2.ExposureClass]
    downlink: _containers.RepeatedScalarFieldContainer[_exposure_pb2.ExposureClass]
    participation: float
    privacy: Privacy
    secure_aggregation: SecureAggregation
    def __init__(self, federation: _Optional[str] = ..., coordinator: _Optional[str] = ..., run: _Optional[str] = ..., method: _Optional[_Union[Method, _Mapping]] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., training: _Optional[_Union[Training, _Mapping]] = ..., rounds: _Optional[int] = ..., seed: _Optional[int] = ..., required: _Optional[_Iterable[_Union[_exposure_pb2.ExposureClass, str]]] = ..., optional: _Optional[_Iterable[_Union[_exposure_pb2.ExposureClass, str]]] = ..., downlink: _Optional[_Iterable[_Union[_exposure_pb2.ExposureClass, str]]] = ..., participation: _Optional[float] = ..., privacy: _Optional[_Union[Privacy, _Mapping]] = ..., secure_aggregation: _Optional[_Union[SecureAggregation, _Mapping]] = ...) -> None: ...

class Method(_message.Message):
    __slots__ = ("name", "parameters_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameters_json: str
    def __init__(self, name: _Optional[str] = ..., parameters_json: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "input_shape", "classes", "train", "weights")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INPUT_SHAPE_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    input_shape: _containers.RepeatedScalarFieldContainer[int]
    classes: int
    train: Train
    weights: Weights
    def __init__(self, name: _Optional[str] = ..., input_shape: _Optional[_Iterable[int]] = ..., classes: _Optional[int] = ..., train: _Optional[_Union[Train, _Mapping]] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ...) -> None: ...

class Train(_message.Message):
    __slots__ = ("last", "rank")
    LAST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    last: int
    rank: int
    def __init__(self, last: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class Weights(_message.Message):
    __slots__ = ("sha256", "tensors_sha256", "source", "licence", "public", "without", "brought")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    TENSORS_SHA256_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LICENCE_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_FIELD_NUMBER: _ClassVar[int]
    BROUGHT_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    tensors_sha256: str
    source: str
    licence: str
    public: bool
    without: str
    brought: bool
    def __init__(self, sha256: _Optional[str] = ..., tensors_sha256: _Optional[str] = ..., source: _Optional[str] = ..., licence: _Optional[str] = ..., public: _Optional[bool] = ..., without: _Optional[str] = ..., brought: _Optional[bool] = ...) -> None: ...

class Training(_message.Message):
    __slots__ = ("epochs", "batch_size", "optimizer", "learning_rate", "momentum", "weight_decay", "keep_optimizer_state", "augmentation", "class_weights")
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    KEEP_OPTIMIZER_STATE_FIELD_NUMBER: _ClassVar[int]
    AUGMENTATION_FIELD_NUMBER: _ClassVar[int]
    CLASS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    epochs: int
    batch_size: int
    optimizer: str
    learning_rate: float
    momentum: float
    weight_decay: float
    keep_optimizer_state: bool
    augmentation: _containers.RepeatedCompositeFieldContainer[Augmentation]
    class_weights: str
    def __init__(self, epochs: _Optional[int] = ..., batch_size: _Optional[int] = ..., optimizer: _Optional[str] = ..., learning_rate: _Optional[float] = ..., momentum: _Optional[float] = ..., weight_decay: _Optional[float] = ..., keep_optimizer_state: _Optional[bool] = ..., augmentation: _Optional[_Iterable[_Union[Augmentation, _Mapping]]] = ..., class_weights: _Optional[str] = ...) -> None: ...

class Augmentation(_message.Message):
    __slots__ = ("kind", "amount")
    KIND_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    amount: float
    def __init__(self, kind: _Optional[str] = ..., amount: _Optional[float] = ...) -> None: ...

class Privacy(_message.Message):
    __slots__ = ("epsilon", "delta", "unit", "adjacency", "accountant", "clipping_norm", "noise_multiplier", "sampling_rate", "steps", "releases", "metrics", "averaged_share", "honest")
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ADJACENCY_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTANT_FIELD_NUMBER: _ClassVar[int]
    CLIPPING_NORM_FIELD_NUMBER: _ClassVar[int]
    NOISE_MULTIPLIER_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_RATE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    AVERAGED_SHARE_FIELD_NUMBER: _ClassVar[int]
    HONEST_FIELD_NUMBER: _ClassVar[int]
    epsilon: float
    delta: float
    unit: str
    adjacency: str
    accountant: str
    clipping_norm: float
    noise_multiplier: float
    sampling_rate: float
    steps: int
    releases: _containers.RepeatedCompositeFieldContainer[Release]
    metrics: Metrics
    averaged_share: float
    honest: int
    def __init__(self, epsilon: _Optional[float] = ..., delta: _Optional[float] = ..., unit: _Optional[str] = ..., adjacency: _Optional[str] = ..., accountant: _Optional[str] = ..., clipping_norm: _Optional[float] = ..., noise_multiplier: _Optional[float] = ..., sampling_rate: _Optional[float] = ..., steps: _Optional[int] = ..., releases: _Optional[_Iterable[_Union[Release, _Mapping]]] = ..., metrics: _Optional[_Union[Metrics, _Mapping]] = ..., averaged_share: _Optional[float] = ..., honest: _Optional[int] = ...) -> None: ...

class Metrics(_message.Message):
    __slots__ = ("epsilon", "releases", "mechanism", "deviation")
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    MECHANISM_FIELD_NUMBER: _ClassVar[int]
    DEVIATION_FIELD_NUMBER: _ClassVar[int]
    epsilon: float
    releases: int
    mechanism: str
    deviation: float
    def __init__(self, epsilon: _Optional[float] = ..., releases: _Optional[int] = ..., mechanism: _Optional[str] = ..., deviation: _Optional[float] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("content", "bound", "noise_multiplier", "times")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    NOISE_MULTIPLIER_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    content: str
    bound: float
    noise_multiplier: float
    times: int
    def __init__(self, content: _Optional[str] = ..., bound: _Optional[float] = ..., noise_multiplier: _Optional[float] = ..., times: _Optional[int] = ...) -> None: ...

class SecureAggregation(_message.Message):
    __slots__ = ("minimum", "fraction_bits", "rounds", "mode", "sketch_size", "largest_isolation")
    MINIMUM_FIELD_NUMBER: _ClassVar[int]
    FRACTION_BITS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SKETCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    LARGEST_ISOLATION_FIELD_NUMBER: _ClassVar[int]
    minimum: int
    fraction_bits: int
    rounds: int
    mode: str
    sketch_size: int
    largest_isolation: float
    def __init__(self, minimum: _Optional[int] = ..., fraction_bits: _Optional[int] = ..., rounds: _Optional[int] = ..., mode: _Optional[str] = ..., sketch_size: _Optional[int] = ..., largest_isolation: _Optional[float] = ...) -> None: ...
