from outrider.v1 import common_pb2 as _common_pb2
from outrider.v1 import draft_pb2 as _draft_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScorerServiceGenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "stop", "speculation", "running_stats", "constraint", "top_logprobs", "num_resumed_tokens", "tenant", "stream_interval", "prompt_logprobs", "adapter", "draft_trees")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_STATS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TREES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    stop: _common_pb2.StopParams
    speculation: _common_pb2.SpeculationParams
    running_stats: bool
    constraint: _common_pb2.Constraint
    top_logprobs: int
    num_resumed_tokens: int
    tenant: str
    stream_interval: int
    prompt_logprobs: int
    adapter: str
    draft_trees: bool
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[_common_pb2.StopParams, _Mapping]] = ..., speculation: _Optional[_Union[_common_pb2.SpeculationParams, _Mapping]] = ..., running_stats: _Optional[bool] = ..., constraint: _Optional[_Union[_common_pb2.Constraint, _Mapping]] = ..., top_logprobs: _Optional[int] = ..., num_resumed_tokens: _Optional[int] = ..., tenant: _Optional[str] = ..., stream_interval: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., adapter: _Optional[str] = ..., draft_trees: _Optional[bool] = ...) -> None: ...

class ScorerServiceGenerateResponse(_message.Message):
    __slots__ = ("token_ids", "kinds", "finish_reason", "usage", "aux_info", "logprobs", "stop_token_id", "prompt_logprobs", "drafts")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    AUX_INFO_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    kinds: _containers.RepeatedScalarFieldContainer[_common_pb2.TokenKind]
    finish_reason: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    aux_info: _common_pb2.AuxInfo
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    stop_token_id: int
    prompt_logprobs: _common_pb2.PromptLogprobs
    drafts: _containers.RepeatedCompositeFieldContainer[VerifiedDraft]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., kinds: _Optional[_Iterable[_Union[_common_pb2.TokenKind, str]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., aux_info: _Optional[_Union[_common_pb2.AuxInfo, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., stop_token_id: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ..., drafts: _Optional[_Iterable[_Union[VerifiedDraft, _Mapping]]] = ...) -> None: ...

class VerifiedDraft(_message.Message):
    __slots__ = ("base_len", "token_ids", "parents")
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    base_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, base_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateStepsRequest(_message.Message):
    __slots__ = ("begin", "cancelled_ids")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_IDS_FIELD_NUMBER: _ClassVar[int]
    begin: StepsCall
    cancelled_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, begin: _Optional[_Union[StepsCall, _Mapping]] = ..., cancelled_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepsCall(_message.Message):
    __slots__ = ("id", "request", "timeout_ms", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    id: int
    request: ScorerServiceGenerateRequest
    timeout_ms: int
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, id: _Optional[int] = ..., request: _Optional[_Union[ScorerServiceGenerateRequest, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GenerateStepsResponse(_message.Message):
    __slots__ = ("ids", "counts", "token_ids", "kinds", "details")
    IDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    kinds: bytes
    details: _containers.RepeatedCompositeFieldContainer[StepsDetails]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., kinds: _Optional[bytes] = ..., details: _Optional[_Iterable[_Union[StepsDetails, _Mapping]]] = ...) -> None: ...

class StepsDetails(_message.Message):
    __slots__ = ("id", "response", "status")
    ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    id: int
    response: ScorerServiceGenerateResponse
    status: bytes
    def __init__(self, id: _Optional[int] = ..., response: _Optional[_Union[ScorerServiceGenerateResponse, _Mapping]] = ..., status: _Optional[bytes] = ...) -> None: ...

class GetScorerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetScorerInfoResponse(_message.Message):
    __slots__ = ("scorer_id", "model", "served_model_name", "vocab_size", "tokenizer_hash", "max_model_len", "protocol_version", "eos_token_ids", "dtype", "running_requests", "waiting_requests", "total_pages", "free_pages", "proposers", "features", "page_size", "steps_version", "adapters")
    SCORER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    PROPOSERS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    STEPS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    scorer_id: str
    model: str
    served_model_name: str
    vocab_size: int
    tokenizer_hash: str
    max_model_len: int
    protocol_version: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    running_requests: int
    waiting_requests: int
    total_pages: int
    free_pages: int
    proposers: _containers.RepeatedCompositeFieldContainer[AttachedProposer]
    features: _draft_pb2.FeatureSpec
    page_size: int
    steps_version: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, scorer_id: _Optional[str] = ..., model: _Optional[str] = ..., served_model_name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_hash: _Optional[str] = ..., max_model_len: _Optional[int] = ..., protocol_version: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., total_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., proposers: _Optional[_Iterable[_Union[AttachedProposer, _Mapping]]] = ..., features: _Optional[_Union[_draft_pb2.FeatureSpec, _Mapping]] = ..., page_size: _Optional[int] = ..., steps_version: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class AttachedProposer(_message.Message):
    __slots__ = ("proposer_id", "method", "model", "sessions", "set_aside")
    PROPOSER_ID_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    proposer_id: str
    method: str
    model: str
    sessions: int
    set_aside: bool
    def __init__(self, proposer_id: _Optional[str] = ..., method: _Optional[str] = ..., model: _Optional[str] = ..., sessions: _Optional[int] = ..., set_aside: _Optional[bool] = ...) -> None: ...
