from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetProposerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetProposerInfoResponse(_message.Message):
    __slots__ = ("proposer_id", "incarnation", "method", "model", "vocab_size", "tokenizer_hash", "max_sessions", "max_draft_tokens", "max_model_len", "protocol_version", "sessions", "scorers")
    PROPOSER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SCORERS_FIELD_NUMBER: _ClassVar[int]
    proposer_id: str
    incarnation: int
    method: str
    model: str
    vocab_size: int
    tokenizer_hash: str
    max_sessions: int
    max_draft_tokens: int
    max_model_len: int
    protocol_version: int
    sessions: int
    scorers: _containers.RepeatedCompositeFieldContainer[ScorerLink]
    def __init__(self, proposer_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., method: _Optional[str] = ..., model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_hash: _Optional[str] = ..., max_sessions: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ..., protocol_version: _Optional[int] = ..., sessions: _Optional[int] = ..., scorers: _Optional[_Iterable[_Union[ScorerLink, _Mapping]]] = ...) -> None: ...

class ScorerLink(_message.Message):
    __slots__ = ("target", "connected", "sessions", "last_error", "refused")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    target: str
    connected: bool
    sessions: int
    last_error: str
    refused: bool
    def __init__(self, target: _Optional[str] = ..., connected: _Optional[bool] = ..., sessions: _Optional[int] = ..., last_error: _Optional[str] = ..., refused: _Optional[bool] = ...) -> None: ...
