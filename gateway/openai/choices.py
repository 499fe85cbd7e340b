"""Bodies of OpenAI's answers: one object, or the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.answers.blocks import BlockReader
from gateway.generation import Chunk, Ending
from gateway.openai.deltas import MessageReader, MessageReading, message_of
from gateway.openai.frames import TextFrame
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
from outrider.types import FinishReason, TokenKind, TokenLogprobs, VerifiedDraft

_CONTENT_ALONE = {"content"}
DONE = b"data: [DONE]\n\n"
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
    spell: Spell


class Shown(NamedTuple):
    """Size of a choice's output that was sent already."""

    chars: int = 0
    tokens: int = 0

    def and_then(self, chunk: Chunk) -> Shown:
        return Shown(self.chars + len(chunk.text), self.tokens + len(chunk.tokens))


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
    include_usage: bool
    predicted: bool  # whether usage tells what became of a prediction
    spell: Spell | None  # if logprobs are wanted
    how: MessageReading | None  # None: answers are text alone
    echoes: tuple[str, ...]  # prompts to repeat before their completions, or none
    prompts: tuple[ScoredPrompt, ...] = ()  # if their logprobs are wanted
    spell_drafts: Spell | None = None  # if the drafts of rounds are told
    top_prompt_logprobs: int | None = None  # if they are told under vLLM's name
    prompt_lens: tuple[int, ...] = ()  # of each completion, if every event tells the usage so far
    _frames: dict[int, TextFrame] = field(default_factory=dict, init=False, compare=False)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed; `completions` prompt by prompt."""
        chosen: list[Completion] = []
        choices: list[dict[str, Any]] = []
        thoughts = 0
        scores: list[Scores] = []
        for start in range(0, len(completions), self.per_prompt):
            chosen += self.best(completions[start : start + self.per_prompt])
            scores.append(completions[start].ending.prompt_logprobs)
        for index, completion in enumerate(chosen):
            choice, tokens = self._whole_choice(index, completion, scores[index // self.n])
            choices.append(choice)
            thoughts += tokens
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": self._usage([completion.ending for completion in completions], thoughts),
            **self._aux_info([completion.ending for completion in chosen]),
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
            message, called, thoughts = message_of(self.how, texts)
            content = {"message": message}
        else:
            content = {"text": self._echo(index) + "".join(texts)}
        choice = {
            "index": index,
            **content,
            "logprobs": self._logprobs(self._echoed(index, scores, completion.tokens), 0),
            "finish_reason": finish_reason(completion.ending, called=called),
            **self._prompt_logprobs(index, scores),
            **self._tokens(completion.tokens),
        }
        return choice, thoughts

    def opening(self, index: int) -> bytes:
        """Return the event before a choice's first text; in a chat it names the role."""
        if self.kind == "chat":
            return self._event(self._choice(index, {"role": "assistant", "content": ""}, None))
        echo = self._echo(index)
        return self._event(self._choice(index, echo, None)) if echo else b""

    def reader(self) -> MessageReader | None:
        """Create the reader of one choice's answer; None where answers are text alone."""
        return None if self.how is None else MessageReader(self.how)

    def blocks(self) -> BlockReader:
        """Create the reader of one answer's blocks, as other APIs than OpenAI's chats have them."""
        if self.how is None:
            return BlockReader(None, with_reasoning=True)
        return BlockReader(self.how.reading, with_reasoning=self.how.with_reasoning)

    def piece(self, index: int, chunk: Chunk, shown: Shown, reader: MessageReader | None) -> bytes:
        """Return the event of a chunk behind what was `shown`; with nothing to tell, none."""
        plain = not (self.spell or self.token_kinds or self.prompt_lens or self.spell_drafts)
        if plain and reader is None:
            return self._text_event(index, chunk.text) if chunk.text else b""
        content: Any = {"content": chunk.text} if self.kind == "chat" else chunk.text
        told = bool(chunk.text)
        if reader is not None:
            content = reader.delta(
                [token.text for token in chunk.tokens], last=chunk.ending is not None
            )
            told = bool(content)
            if plain and content.keys() == _CONTENT_ALONE:
                return self._text_event(index, content["content"])
        drafts = self._drafts(chunk.drafts)
        if not told and not drafts and not ((self.spell or self.token_kinds) and chunk.tokens):
            return b""
        logprobs = self._logprobs(chunk.tokens, shown.chars)
        choice = self._choice(index, content, None, logprobs)
        tokens = shown.tokens + len(chunk.tokens)
        return self._event({**choice, **self._tokens(chunk.tokens), **drafts}, tokens=tokens)

    def _text_event(self, index: int, text: str) -> bytes:
        """Return the event of a piece that is text alone."""
        frame = self._frames.get(index)
        if frame is None:
            mark = TextFrame.mark()
            content: Any = {"content": mark} if self.kind == "chat" else mark
            frame = TextFrame.of(self._event(self._choice(index, content, None)))
            self._frames[index] = frame
        return frame.event(text)

    def end_of_choice(
        self, index: int, ending: Ending, endings: Sequence[Ending] | None, *, called: bool
    ) -> bytes:
        """Return the event with the finish reason; `endings` of all choices if this is the last."""
        content: Any = {} if self.kind == "chat" else ""
        extra = {} if endings is None or self.include_usage else self._aux_info(endings)
        choice = self._choice(index, content, finish_reason(ending, called=called))
        return self._event(choice, extra, tokens=ending.usage.completion_tokens)

    def end(self, endings: Sequence[Ending], thoughts: int) -> bytes:
        """Return the stream's last events; `thoughts`: reasoning tokens of all choices."""
        if not self.include_usage:
            return DONE
        head = self._head("chat.completion.chunk")
        usage = self._usage(endings, thoughts)
        return event({**head, "choices": [], "usage": usage, **self._aux_info(endings)}) + DONE

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
        return {"prompt_logprobs": prompt_logprobs(prompt.token_ids, scores, top, prompt.spell)}

    def _echo(self, index: int) -> str:
        return self.echoes[index // self.n] if self.echoes else ""

    def _tokens(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        if not self.token_kinds:
            return {}
        fields = [{"id": t.id, "kind": t.kind.value, "text": t.text} for t in tokens]
        return {"tokens": fields}

    def _drafts(self, drafts: Sequence[VerifiedDraft]) -> dict[str, Any]:
        if self.spell_drafts is None or not drafts:
            return {}
        spell = self.spell_drafts
        return {
            "drafts": [
                {
                    "position": draft.base_len,
                    "tokens": [
                        {"id": token, "text": spell(token).decode(errors="replace")}
                        for token in draft.token_ids
                    ],
                    "parents": list(draft.parents or range(-1, len(draft.token_ids) - 1)),
                }
                for draft in drafts
            ]
        }

    def _logprobs(self, tokens: Sequence[OutputToken], offset: int) -> dict[str, Any] | None:
        if self.spell is None:
            return None
        if self.kind == "chat":
            return chat_logprobs(tokens, self.spell)
        return completion_logprobs(tokens, self.spell, offset)

    def _choice(
        self,
        index: int,
        content: Any,
        finish_reason: str | None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            "index": index,
            "delta" if self.kind == "chat" else "text": content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _event(
        self, choice: dict[str, Any], extra: dict[str, Any] | None = None, tokens: int = 0
    ) -> bytes:
        """Return a choice's event, by whose end so many of its `tokens` were sent."""
        body = self._head("chat.completion.chunk")
        body["choices"] = [choice]
        if self.prompt_lens:
            body["usage"] = counts(self.prompt_lens[choice["index"]], tokens)
        elif self.include_usage:
            body["usage"] = None
        return event({**body, **(extra or {})})

    def _head(self, chat_object: str) -> dict[str, Any]:
        """Return the fields that every body begins with; chats have two kinds of object."""
        return {
            "id": self.request_id,
            "object": chat_object if self.kind == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _usage(self, endings: Sequence[Ending], thoughts: int) -> dict[str, Any]:
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
        if self.how is not None:
            details["reasoning_tokens"] = thoughts
        if details:
            usage["completion_tokens_details"] = details
        return usage

    def _aux_info(self, endings: Sequence[Ending]) -> dict[str, Any]:
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
