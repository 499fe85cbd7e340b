from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftRequest(_message.Message):
    __slots__ = ("hello", "blocks", "lost", "goodbye", "projection", "data_connected")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_FIELD_NUMBER: _ClassVar[int]
    DATA_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    blocks: BlockBatch
    lost: Lost
    goodbye: Goodbye
    projection: ProjectionChunk
    data_connected: DataConnected
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., blocks: _Optional[_Union[BlockBatch, _Mapping]] = ..., lost: _Optional[_Union[Lost, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., projection: _Optional[_Union[ProjectionChunk, _Mapping]] = ..., data_connected: _Optional[_Union[DataConnected, _Mapping]] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("welcome", "sessions")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    sessions: SessionBatch
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., sessions: _Optional[_Union[SessionBatch, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "proposer_id", "incarnation", "method", "model", "vocab_size", "tokenizer_hash", "max_sessions", "max_draft_tokens", "max_model_len", "pool", "runs_ahead", "methods", "features", "device", "data_connection")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROPOSER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    RUNS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DATA_CONNECTION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    proposer_id: str
    incarnation: int
    method: str
    model: str
    vocab_size: int
    tokenizer_hash: str
    max_sessions: int
    max_draft_tokens: int
    max_model_len: int
    pool: str
    runs_ahead: bool
    methods: _containers.RepeatedScalarFieldContainer[str]
    features: FeatureSpec
    device: str
    data_connection: bool
    def __init__(self, protocol_version: _Optional[int] = ..., proposer_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., method: _Optional[str] = ..., model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_hash: _Optional[str] = ..., max_sessions: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ..., pool: _Optional[str] = ..., runs_ahead: _Optional[bool] = ..., methods: _Optional[_Iterable[str]] = ..., features: _Optional[_Union[FeatureSpec, _Mapping]] = ..., device: _Optional[str] = ..., data_connection: _Optional[bool] = ...) -> None: ...

class FeatureSpec(_message.Message):
    __slots__ = ("layers", "final_norm", "hidden_size", "projection_dim", "projection_sha256")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FINAL_NORM_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_DIM_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_SHA256_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    final_norm: bool
    hidden_size: int
    projection_dim: int
    projection_sha256: bytes
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., final_norm: _Optional[bool] = ..., hidden_size: _Optional[int] = ..., projection_dim: _Optional[int] = ..., projection_sha256: _Optional[bytes] = ...) -> None: ...

class ProjectionChunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "scorer_id", "vocab_size", "max_block_tokens", "wants_projection", "data_connection")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCORER_ID_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WANTS_PROJECTION_FIELD_NUMBER: _ClassVar[int]
    DATA_CONNECTION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    scorer_id: str
    vocab_size: int
    max_block_tokens: int
    wants_projection: bool
    data_connection: DataConnection
    def __init__(self, protocol_version: _Optional[int] = ..., scorer_id: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_block_tokens: _Optional[int] = ..., wants_projection: _Optional[bool] = ..., data_connection: _Optional[_Union[DataConnection, _Mapping]] = ...) -> None: ...

class DataConnection(_message.Message):
    __slots__ = ("port", "socket", "key")
    PORT_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    port: int
    socket: str
    key: bytes
    def __init__(self, port: _Optional[int] = ..., socket: _Optional[str] = ..., key: _Optional[bytes] = ...) -> None: ...

class DataConnected(_message.Message):
    __slots__ = ("used",)
    USED_FIELD_NUMBER: _ClassVar[int]
    used: bool
    def __init__(self, used: _Optional[bool] = ...) -> None: ...

class SessionBatch(_message.Message):
    __slots__ = ("opens", "commits", "closes", "step_us", "features")
    OPENS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    opens: _containers.RepeatedCompositeFieldContainer[Open]
    commits: _containers.RepeatedCompositeFieldContainer[Commit]
    closes: _containers.RepeatedCompositeFieldContainer[Close]
    step_us: int
    features: _containers.RepeatedCompositeFieldContainer[Features]
    def __init__(self, opens: _Optional[_Iterable[_Union[Open, _Mapping]]] = ..., commits: _Optional[_Iterable[_Union[Commit, _Mapping]]] = ..., closes: _Optional[_Iterable[_Union[Close, _Mapping]]] = ..., step_us: _Optional[int] = ..., features: _Optional[_Iterable[_Union[Features, _Mapping]]] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("session", "epoch", "start", "rows")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    start: int
    rows: bytes
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., start: _Optional[int] = ..., rows: _Optional[bytes] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("session", "epoch", "prefix", "sampling", "num_draft_tokens", "max_len", "traceparent", "advice", "constraint", "tenant", "methods", "verification_rule", "num_output_tokens")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_RULE_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    prefix: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    num_draft_tokens: int
    max_len: int
    traceparent: str
    advice: _common_pb2.Advice
    constraint: _common_pb2.Constraint
    tenant: str
    methods: _containers.RepeatedScalarFieldContainer[str]
    verification_rule: _common_pb2.VerificationRule
    num_output_tokens: int
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., prefix: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., num_draft_tokens: _Optional[int] = ..., max_len: _Optional[int] = ..., traceparent: _Optional[str] = ..., advice: _Optional[_Union[_common_pb2.Advice, _Mapping]] = ..., constraint: _Optional[_Union[_common_pb2.Constraint, _Mapping]] = ..., tenant: _Optional[str] = ..., methods: _Optional[_Iterable[str]] = ..., verification_rule: _Optional[_Union[_common_pb2.VerificationRule, str]] = ..., num_output_tokens: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("session", "epoch", "base_len", "tokens", "num_draft_tokens")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens: int
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., num_draft_tokens: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("session", "epoch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class BlockBatch(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("session", "epoch", "base_len", "token_ids", "parents", "draft_us", "draft_probs", "method_index", "confidences")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    METHOD_INDEX_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    base_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    draft_us: int
    draft_probs: _containers.RepeatedCompositeFieldContainer[DraftProbs]
    method_index: int
    confidences: bytes
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., base_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., draft_us: _Optional[int] = ..., draft_probs: _Optional[_Iterable[_Union[DraftProbs, _Mapping]]] = ..., method_index: _Optional[int] = ..., confidences: _Optional[bytes] = ...) -> None: ...

class DraftProbs(_message.Message):
    __slots__ = ("token_ids", "probs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    probs: bytes
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., probs: _Optional[bytes] = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ("session", "epoch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
