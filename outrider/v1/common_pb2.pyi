from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerificationRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFICATION_RULE_UNSPECIFIED: _ClassVar[VerificationRule]
    VERIFICATION_RULE_COUPLED: _ClassVar[VerificationRule]
    VERIFICATION_RULE_REJECTION: _ClassVar[VerificationRule]
    VERIFICATION_RULE_TYPICAL: _ClassVar[VerificationRule]
    VERIFICATION_RULE_TOP_P_WINDOW: _ClassVar[VerificationRule]
    VERIFICATION_RULE_BLOCK: _ClassVar[VerificationRule]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class TokenKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_KIND_UNSPECIFIED: _ClassVar[TokenKind]
    TOKEN_KIND_PLAIN: _ClassVar[TokenKind]
    TOKEN_KIND_ACCEPTED: _ClassVar[TokenKind]
    TOKEN_KIND_RECOVERED: _ClassVar[TokenKind]
    TOKEN_KIND_BONUS: _ClassVar[TokenKind]
VERIFICATION_RULE_UNSPECIFIED: VerificationRule
VERIFICATION_RULE_COUPLED: VerificationRule
VERIFICATION_RULE_REJECTION: VerificationRule
VERIFICATION_RULE_TYPICAL: VerificationRule
VERIFICATION_RULE_TOP_P_WINDOW: VerificationRule
VERIFICATION_RULE_BLOCK: VerificationRule
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
TOKEN_KIND_UNSPECIFIED: TokenKind
TOKEN_KIND_PLAIN: TokenKind
TOKEN_KIND_ACCEPTED: TokenKind
TOKEN_KIND_RECOVERED: TokenKind
TOKEN_KIND_BONUS: TokenKind

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_object", "json_schema", "regex", "grammar")
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_object: bool
    json_schema: str
    regex: str
    grammar: str
    def __init__(self, json_object: _Optional[bool] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ...) -> None: ...

class StopParams(_message.Message):
    __slots__ = ("max_tokens", "stop_token_ids", "ignore_eos", "min_tokens")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_tokens: int
    def __init__(self, max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class SpeculationParams(_message.Message):
    __slots__ = ("enabled", "method", "num_speculative_tokens", "methods", "verification", "advice")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    method: str
    num_speculative_tokens: int
    methods: _containers.RepeatedScalarFieldContainer[str]
    verification: Verification
    advice: Advice
    def __init__(self, enabled: _Optional[bool] = ..., method: _Optional[str] = ..., num_speculative_tokens: _Optional[int] = ..., methods: _Optional[_Iterable[str]] = ..., verification: _Optional[_Union[Verification, _Mapping]] = ..., advice: _Optional[_Union[Advice, _Mapping]] = ...) -> None: ...

class Verification(_message.Message):
    __slots__ = ("rule", "epsilon", "alpha", "max_candidate_len", "verify_window")
    RULE_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    MAX_CANDIDATE_LEN_FIELD_NUMBER: _ClassVar[int]
    VERIFY_WINDOW_FIELD_NUMBER: _ClassVar[int]
    rule: VerificationRule
    epsilon: float
    alpha: float
    max_candidate_len: int
    verify_window: int
    def __init__(self, rule: _Optional[_Union[VerificationRule, str]] = ..., epsilon: _Optional[float] = ..., alpha: _Optional[float] = ..., max_candidate_len: _Optional[int] = ..., verify_window: _Optional[int] = ...) -> None: ...

class Advice(_message.Message):
    __slots__ = ("token_ids", "edit", "min_token_match", "max_token_match", "references")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EDIT_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKEN_MATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKEN_MATCH_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    edit: bool
    min_token_match: int
    max_token_match: int
    references: _containers.RepeatedCompositeFieldContainer[Reference]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., edit: _Optional[bool] = ..., min_token_match: _Optional[int] = ..., max_token_match: _Optional[int] = ..., references: _Optional[_Iterable[_Union[Reference, _Mapping]]] = ...) -> None: ...

class Reference(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_prompt_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class AuxInfo(_message.Message):
    __slots__ = ("cost_time", "output_len", "iter_count", "avg_tokens_per_iter", "rounds", "drafted", "accepted", "accepted_per_pos", "k_histogram", "hits", "misses_late", "misses_wrong", "waits", "wait_ms", "fallback_rounds", "queue_ms", "prefill_ms", "propose_ms", "score_ms", "network_ms", "cached_prompt_tokens", "proposer_ids", "scorer_id", "retries", "verification", "preemptions", "rounds_after_hit", "hits_after_hit", "rounds_after_miss", "hits_after_miss", "exact", "by_method", "drafts_per_context", "accepted_per_context")
    COST_TIME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LEN_FIELD_NUMBER: _ClassVar[int]
    ITER_COUNT_FIELD_NUMBER: _ClassVar[int]
    AVG_TOKENS_PER_ITER_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POS_FIELD_NUMBER: _ClassVar[int]
    K_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_LATE_FIELD_NUMBER: _ClassVar[int]
    MISSES_WRONG_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_MS_FIELD_NUMBER: _ClassVar[int]
    SCORE_MS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSER_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORER_ID_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_AFTER_HIT_FIELD_NUMBER: _ClassVar[int]
    HITS_AFTER_HIT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_AFTER_MISS_FIELD_NUMBER: _ClassVar[int]
    HITS_AFTER_MISS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    BY_METHOD_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_PER_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    cost_time: float
    output_len: int
    iter_count: int
    avg_tokens_per_iter: float
    rounds: int
    drafted: int
    accepted: int
    accepted_per_pos: _containers.RepeatedScalarFieldContainer[int]
    k_histogram: _containers.RepeatedScalarFieldContainer[int]
    hits: int
    misses_late: int
    misses_wrong: int
    waits: int
    wait_ms: float
    fallback_rounds: int
    queue_ms: float
    prefill_ms: float
    propose_ms: float
    score_ms: float
    network_ms: float
    cached_prompt_tokens: int
    proposer_ids: _containers.RepeatedScalarFieldContainer[str]
    scorer_id: str
    retries: int
    verification: str
    preemptions: int
    rounds_after_hit: int
    hits_after_hit: int
    rounds_after_miss: int
    hits_after_miss: int
    exact: bool
    by_method: _containers.RepeatedCompositeFieldContainer[MethodCounts]
    drafts_per_context: _containers.RepeatedScalarFieldContainer[int]
    accepted_per_context: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, cost_time: _Optional[float] = ..., output_len: _Optional[int] = ..., iter_count: _Optional[int] = ..., avg_tokens_per_iter: _Optional[float] = ..., rounds: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., accepted_per_pos: _Optional[_Iterable[int]] = ..., k_histogram: _Optional[_Iterable[int]] = ..., hits: _Optional[int] = ..., misses_late: _Optional[int] = ..., misses_wrong: _Optional[int] = ..., waits: _Optional[int] = ..., wait_ms: _Optional[float] = ..., fallback_rounds: _Optional[int] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., propose_ms: _Optional[float] = ..., score_ms: _Optional[float] = ..., network_ms: _Optional[float] = ..., cached_prompt_tokens: _Optional[int] = ..., proposer_ids: _Optional[_Iterable[str]] = ..., scorer_id: _Optional[str] = ..., retries: _Optional[int] = ..., verification: _Optional[str] = ..., preemptions: _Optional[int] = ..., rounds_after_hit: _Optional[int] = ..., hits_after_hit: _Optional[int] = ..., rounds_after_miss: _Optional[int] = ..., hits_after_miss: _Optional[int] = ..., exact: _Optional[bool] = ..., by_method: _Optional[_Iterable[_Union[MethodCounts, _Mapping]]] = ..., drafts_per_context: _Optional[_Iterable[int]] = ..., accepted_per_context: _Optional[_Iterable[int]] = ...) -> None: ...

class MethodCounts(_message.Message):
    __slots__ = ("method", "drafted", "accepted")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    method: str
    drafted: int
    accepted: int
    def __init__(self, method: _Optional[str] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("logprobs", "top_token_ids", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...
