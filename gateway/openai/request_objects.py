"""Objects within request bodies: speculation, expected output, output formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from outrider.errors import InvalidRequestError
from outrider.params import (
    MAX_LOGIT_BIASES,
    Constraint,
    ConstraintKind,
    SpeculationParams,
    require,
)
from outrider.rpc.codec import RULE_TO_PROTO, speculation_from_proto
from outrider.v1 import common_pb2

T = TypeVar("T")


def _few(biases: Any) -> Any:
    """As few as `SamplingParams` takes. Raises `InvalidRequestError`."""
    require(
        not isinstance(biases, dict) or len(biases) <= MAX_LOGIT_BIASES,
        "logit_bias",
        f"at most {MAX_LOGIT_BIASES} different tokens",
    )
    return biases


UINT32 = Annotated[int, Field(ge=0, lt=2**32)]
# A body is as large as the gateway lets it be, and an error costs far more than the element it is
# about: a list ends at its first one, a map is counted before it is read.
Items = Annotated[list[T], Field(fail_fast=True)]
Biases = Annotated[dict[str, float], BeforeValidator(_few)]

HARMLESS_IN_MESSAGES = frozenset(
    {
        *("id", "timestamp", "created", "created_at", "createdAt", "metadata", "status"),
        *("cache_control", "provider_metadata", "providerMetadata", "providerOptions"),
        *("annotations", "model", "usage"),
    }
)
"""Notes of clients, and hints for other servers, that say nothing to a model."""

MUST_BE: Final = "must_be"
"""Type of errors whose text goes on behind the field's name and "must be"."""

Kind = Literal["text_completion", "chat"]  # gen_ai.operation.name

_RULES = {rule.value: number for rule, number in RULE_TO_PROTO.items()}
# What has a meaning of its own in a regular expression, and may stand behind a backslash in any.
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")


class Strict(BaseModel):
    """No conversions and no unknown fields, but those that are null or `harmless`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
    harmless: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        """Each unknown field would be an error: of too many the first is enough."""
        if not isinstance(value, dict):
            return value
        names = {field.alias or name for name, field in cls.model_fields.items()}
        if value.keys() <= names:
            return value
        others = (
            name
            for name, each in value.items()
            if name not in names and name not in cls.harmless and each is not None
        )
        wrong = next(others, None)
        return {name: each for name, each in value.items() if name in names or name == wrong}


def text_or_list(value: Any, part: Callable[[str], Any], kind: str) -> Any:
    """Return a list, which may come as one text; `kind` names its elements in errors."""
    if isinstance(value, str):
        return [part(value)]
    if not isinstance(value, list):
        raise PydanticCustomError(MUST_BE, "a text or a list of {kind}", {"kind": kind})
    return value


def within(place: str, error: InvalidRequestError) -> InvalidRequestError:
    """Name the field of `error` by its full path, as the client wrote it."""
    field = error.param or ""
    return InvalidRequestError(
        f"{place}.{error.message}" if error.message.startswith(field) else error.message,
        param=f"{place}.{field}",
    )


class StreamOptions(Strict):
    """OpenAI's options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far in every event
    include_obfuscation: bool | None = None  # padding against traffic analysis: ours has none


class TextPart(Strict):
    """A part of a message's content; clients' notes and hints have no effect."""

    harmless = HARMLESS_IN_MESSAGES

    type: Literal["text"]
    text: str


class Verification(Strict):
    """Which drafted tokens are accepted; as a string, the rule alone."""

    rule: Literal["coupled", "rejection", "block", "typical", "top_p_window"] = "coupled"
    epsilon: float | None = None
    alpha: float | None = None
    max_candidate_len: UINT32 | None = None
    verify_window: UINT32 | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_rule(cls, value: Any) -> Any:
        return {"rule": value} if isinstance(value, str) else value

    def to_proto(self) -> common_pb2.Verification:
        settings = self.model_dump(exclude={"rule"})
        return common_pb2.Verification(rule=_RULES[self.rule], **settings)


class Speculation(Strict):
    """Per-request control of speculative decoding."""

    enabled: bool = True
    method: str | None = None
    methods: Items[str] | None = None
    num_speculative_tokens: UINT32 | None = None
    verification: Verification | None = None
    references: Items[str | Items[UINT32]] | None = None

    def params(self) -> SpeculationParams:
        """Without the references, which are not tokenised yet. Raises `InvalidRequestError`."""
        message = common_pb2.SpeculationParams(
            enabled=self.enabled,
            method=self.method,
            methods=self.methods,
            num_speculative_tokens=self.num_speculative_tokens,
            verification=None if self.verification is None else self.verification.to_proto(),
        )
        try:
            return speculation_from_proto(message)
        except InvalidRequestError as error:
            deeper = error.param in Verification.model_fields
            raise within("speculation.verification" if deeper else "speculation", error) from error


class Prediction(Strict):
    """OpenAI's predicted outputs."""

    type: Literal["content"]
    content: str | Items[TextPart]

    @property
    def text(self) -> str:
        return join(self.content)


class ExtraConfig(Strict):
    """RTP-LLM's names for the same, with its settings."""

    sp_advice_prompt: str | None = None
    sp_advice_prompt_token_ids: Items[UINT32] | None = None
    sp_edit: bool | Literal[0, 1] | None = None
    sp_min_token_match: int | None = None
    sp_max_token_match: int | None = None


class JsonSchemaFormat(Strict):
    """OpenAI's json_schema format."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # kept to the schema either way


class ResponseFormat(Strict):
    """OpenAI's structured outputs."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def constraint(self) -> tuple[Constraint, str] | None:
        """With the parameter's name. Raises `InvalidRequestError`."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequestError(
                'response_format.json_schema goes with type "json_schema", and only with it.',
                param="response_format.json_schema",
            )
        if self.json_schema is not None:
            source = json.dumps(self.json_schema.schema_)
            return _constraint(ConstraintKind.JSON_SCHEMA, source, "response_format")
        if self.type == "json_object":
            return Constraint(ConstraintKind.JSON_OBJECT), "response_format"
        return None


class StructuredOutputs(Strict):
    """vLLM's structured outputs: exactly one of the fields."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[Items[str], Field(min_length=1)] | None = None
    grammar: str | None = None

    def constraint(self) -> tuple[Constraint, str]:
        """With the parameter's name. Raises `InvalidRequestError`."""
        given = {
            name: value
            for name, value in self.model_dump(by_alias=True).items()
            if value is not None and value is not False
        }
        if len(given) != 1:
            raise InvalidRequestError(
                "structured_outputs must hold exactly one of json, json_object, regex, choice "
                "and grammar.",
                param="structured_outputs",
            )
        ((name, value),) = given.items()
        param = f"structured_outputs.{name}"
        if name == "json_object":
            return Constraint(ConstraintKind.JSON_OBJECT), param
        kind = {"json": ConstraintKind.JSON_SCHEMA, "grammar": ConstraintKind.GRAMMAR}.get(
            name, ConstraintKind.REGEX
        )
        if name == "choice":
            value = "|".join(_META.sub(r"\\\g<0>", text) for text in value)
        return _constraint(kind, value if isinstance(value, str) else json.dumps(value), param)


def _constraint(kind: ConstraintKind, source: str, param: str) -> tuple[Constraint, str]:
    try:
        return Constraint(kind, source), param
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{param}: {error.message}", param=param) from error


def join(content: str | list[TextPart]) -> str:
    """Join a text that may come in parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
