"""Bodies of OpenAI's answers: one object, or the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gateway.answers.blocks import BlockReader
from gateway.generation import Ending
from gateway.openai.deltas import MessageReading, message_of
from gateway.openai.logprobs import (
    FIRST,
    Spell,
    chat_logprobs,
    completion_logprobs,
    mean_logprob,
    prompt_logprobs,
)
from gateway.openai.request_objects import Kind
from gateway.openai.usage import aux_info, counts, prediction_usage
from gateway.output import OutputToken
from outrider.params import TokenIds
from outrider.types import FinishReason, TokenKind, TokenLogprobs

Scores = tuple[TokenLogprobs, ...] | None
"""The logprobs of a prompt's tokens but the first."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion that has ended."""

    tokens: tuple[OutputToken, ...]
    ending: Ending


class ScoredPrompt(NamedTuple):
    """A prompt whose logprobs are told."""

    token_ids: TokenIds
    texts: tuple[str, ...]  # what each token adds to the text; none without an echo


@dataclass(frozen=True, slots=True)
class Shaper:
    """Builds the bodies of one request's answer."""

    kind: Kind
    request_id: str
    model: str
    created: int
    n: int  # choices returned for each prompt ...
    per_prompt: int  # ... of so many generated
    aux_info: bool
    token_kinds: bool
    with_logprobs: bool
    with_drafts: bool  # the drafts of rounds are told
    include_usage: bool
    predicted: bool  # whether usage tells what became of a prediction
    spell: Spell
    reading: MessageReading | None  # None: answers are text alone
    echoes: tuple[str, ...]  # prompts to repeat before their completions, or none
    prompts: tuple[ScoredPrompt, ...] = ()  # if their logprobs are wanted
    top_prompt_logprobs: int | None = None  # if they are told under vLLM's name
    prompt_lens: tuple[int, ...] = ()  # of each completion, if every event tells the usage so far

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed; `completions` prompt by prompt."""
        chosen: list[Ending] = []
        choices: list[dict[str, Any]] = []
        thoughts = 0
        for start in range(0, len(completions), self.per_prompt):
            scores = completions[start].ending.prompt_logprobs
            for completion in self.best(completions[start : start + self.per_prompt]):
                choice, tokens = self._whole_choice(len(choices), completion, scores)
                choices.append(choice)
                chosen.append(completion.ending)
                thoughts += tokens
        return {
            **self.head("chat.completion"),
            "choices": choices,
            "usage": self.usage([completion.ending for completion in completions], thoughts),
            **self.aux_fields(chosen),
        }

    def best(self, completions: Sequence[Completion]) -> Sequence[Completion]:
        """Return a prompt's completions that are in the answer: all, or the likeliest `n`."""
        if self.n == self.per_prompt:
            return completions
        ranked = sorted(completions, key=lambda c: mean_logprob(c.tokens), reverse=True)
        return ranked[: self.n]

    def _whole_choice(
        self, index: int, completion: Completion, scores: Scores
    ) -> tuple[dict[str, Any], int]:
        """Return a choice, and its number of reasoning tokens."""
        texts = [token.text for token in completion.tokens]
        called, thoughts = False, 0
        content: dict[str, Any]
        if self.kind == "chat":
            message, called, thoughts = message_of(self.reading, texts)
            content = {"message": message}
        else:
            content = {"text": self.echo(index) + "".join(texts)}
        choice = {
            "index": index,
            **content,
            "logprobs": self.logprobs(self._echoed(index, scores, completion.tokens), 0),
            "finish_reason": finish_reason(completion.ending, called=called),
            **self._prompt_logprobs(index, scores),
            **self.token_fields(completion.tokens),
        }
        return choice, thoughts

    def blocks(self) -> BlockReader:
        """Create the reader of one answer's blocks, as other APIs than OpenAI's chats have them."""
        return BlockReader(None) if self.reading is None else self.reading.reader()

    def _echoed(
        self, index: int, scores: Scores, tokens: Sequence[OutputToken]
    ) -> Sequence[OutputToken]:
        """Return the tokens whose logprobs are told: with an echo, the prompt's before others."""
        if scores is None or not self.echoes:
            return tokens
        prompt = self.prompts[index // self.n]
        entries = zip(prompt.token_ids, prompt.texts, (FIRST, *scores), strict=True)
        echoed = [OutputToken(token, TokenKind.PLAIN, text, each) for token, text, each in entries]
        return [*echoed, *tokens]

    def _prompt_logprobs(self, index: int, scores: Scores) -> dict[str, Any]:
        if scores is None or self.top_prompt_logprobs is None:
            return {}
        prompt, top = self.prompts[index // self.n], self.top_prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(prompt.token_ids, scores, top, self.spell)}

    def echo(self, index: int) -> str:
        """Return the prompt that a choice repeats, if it does."""
        return self.echoes[index // self.n] if self.echoes else ""

    def token_fields(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        """Return the field of a choice that tells its tokens, if it is wanted."""
        if not self.token_kinds:
            return {}
        fields = [{"id": t.id, "kind": t.kind.value, "text": t.text} for t in tokens]
        return {"tokens": fields}

    def logprobs(self, tokens: Sequence[OutputToken], offset: int) -> dict[str, Any] | None:
        """Return the tokens' logprobs, if they are wanted; `offset` characters come before."""
        if not self.with_logprobs:
            return None
        if self.kind == "chat":
            return chat_logprobs(tokens, self.spell)
        return completion_logprobs(tokens, self.spell, offset)

    def head(self, chat_object: str) -> dict[str, Any]:
        """Return the fields that every body begins with; chats have two kinds of object."""
        return {
            "id": self.request_id,
            "object": chat_object if self.kind == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def usage(self, endings: Sequence[Ending], thoughts: int) -> dict[str, Any]:
        """Sum the usage: each prompt counts once, each completion counts."""
        firsts = endings[:: self.per_prompt]
        prompt = sum(ending.usage.prompt_tokens for ending in firsts)
        completion = sum(ending.usage.completion_tokens for ending in endings)
        usage: dict[str, Any] = {
            **counts(prompt, completion),
            "prompt_tokens_details": {
                "cached_tokens": sum(ending.usage.cached_prompt_tokens for ending in firsts)
            },
        }
        details = prediction_usage(endings) if self.predicted else {}
        if self.reading is not None:
            details["reasoning_tokens"] = thoughts
        if details:
            usage["completion_tokens_details"] = details
        return usage

    def aux_fields(self, endings: Sequence[Ending]) -> dict[str, Any]:
        """Return the fields that tell of speculation, if they are wanted."""
        return aux_info([ending.aux_info for ending in endings]) if self.aux_info else {}


def finish_reason(ending: Ending, *, called: bool) -> str:
    """Return OpenAI's word for the reason why a choice has ended."""
    return "tool_calls" if called and ending.reason is FinishReason.STOP else ending.reason.value


def event(body: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def typed_event(body: dict[str, Any]) -> bytes:
    """Return one server-sent event that is named by its type."""
    return f"event: {body['type']}\n".encode() + event(body)
