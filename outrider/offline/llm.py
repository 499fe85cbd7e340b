"""`LLM`: a model in this process, for programs and notebooks."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import index
from types import MappingProxyType
from typing import Any, Self

from tqdm.auto import tqdm

from gateway.config import GeneratorConfig
from gateway.openai.requests import CompletionRequest
from outrider.errors import InvalidRequestError
from outrider.models.resolve import resolve_model
from outrider.models.tokenizer import Tokenizer
from outrider.offline.arguments import (
    Arguments,
    naming_arguments,
    scorer_options,
    take_old_speculation,
)
from outrider.offline.engine import LocalEngine
from outrider.offline.feed import Feed
from outrider.offline.outputs import RequestOutput
from outrider.offline.params import RequestOutputKind, SamplingParams
from outrider.offline.run import Call

Prompt = str | Mapping[str, Any] | Sequence[int]
"""A text, {"prompt": text}, {"prompt_token_ids": ids}, or token ids."""
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None


class LoadedModel:
    """A loaded model, and the requests that are made from a caller's arguments."""

    def __init__(self, model: str, tokenizer: str | None, arguments: dict[str, Any]) -> None:
        """Load the model. Raises `ConfigError` and `UnsupportedModelError`."""
        known = {name: arguments.pop(name) for name in Arguments.__slots__ if name in arguments}
        if (old := take_old_speculation(arguments)) is not None:
            known.setdefault("speculative_config", old)
        given = Arguments(model=str(model), **known)
        self._seeds = random.Random(given.seed)
        self._ids = itertools.count()
        with naming_arguments():
            options = scorer_options(given, arguments)
            self.folder = resolve_model(tokenizer or given.model, "target", tokenizer_only=True)
            name = options.served_model_name
            config = GeneratorConfig(served_model_name=name, ends_at_context=True)
            self.engine = LocalEngine(options, Tokenizer.load(self.folder), config)

    def completion(
        self, prompt: Prompt, params: SamplingParams | None, kind: RequestOutputKind, id_: str = ""
    ) -> Call:
        """Return a request to continue a prompt. Raises `InvalidRequestError`."""
        [call] = self.completions([prompt], [params], kind)
        return replace(call, request_id=id_) if id_ else call

    def completions(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        kind: RequestOutputKind,
    ) -> list[Call]:
        """Return a request to continue each of the prompts. Raises `InvalidRequestError`."""
        stream = kind is not RequestOutputKind.FINAL_ONLY
        bodies: dict[int, CompletionRequest] = {}  # by the parameters, which most prompts share
        calls: list[Call] = []
        for prompt, each in zip(prompts, params, strict=True):
            if (body := bodies.get(id(each))) is None:
                body = (each or SamplingParams()).completion_request(stream=stream)
                bodies[id(each)] = body
            given, seed = _text_or_ids(prompt), self._seed()
            own = {"prompt": given, "seed": seed if body.seed is None else body.seed}
            text = given if isinstance(given, str) else None
            calls.append(Call(body.model_copy(update=own), str(next(self._ids)), text, kind))
        return calls

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None,
        kind: RequestOutputKind,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Call:
        """Return a request to answer a conversation; `options` are more fields of its body.

        Raises `InvalidRequestError`.
        """
        stream = kind is not RequestOutputKind.FINAL_ONLY
        body = (params or SamplingParams()).chat_request(
            messages, self._seed(), stream=stream, options=options
        )
        return Call(body, str(next(self._ids)), None, kind)

    def _seed(self) -> int:
        return self._seeds.getrandbits(63)


class Bar(tqdm):  # type: ignore[misc]
    """A progress bar without a thread of its own."""

    monitor_interval = 0  # seconds; 0: none


class LLM:
    """A model in this process; the arguments are vLLM's (docs/offline.md).

    `model` is "embedded", a folder or a Hugging Face id. Raises `ConfigError` for an argument that
    is wrong or not supported, and `UnsupportedModelError`.
    """

    def __init__(self, model: str, tokenizer: str | None = None, **arguments: Any) -> None:
        self._model = LoadedModel(model, tokenizer, arguments)
        self._dispose = weakref.finalize(self, self._model.engine.dispose)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """Return the completions of the prompts, in their order.

        Raises the first error of any request, after ending the others.
        """
        calls = self._completions(prompts, sampling_params, RequestOutputKind.FINAL_ONLY)
        return self._whole(calls, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return the assistant's answers to one conversation, or to each of several.

        `message` of an answer holds its reasoning and its calls of `tools`.
        """
        options = {
            "tools": tools,
            "tool_choice": tool_choice,
            "chat_template_kwargs": chat_template_kwargs,
        }
        calls = self._chats(messages, sampling_params, RequestOutputKind.FINAL_ONLY, options)
        return self._whole(calls, use_tqdm)

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None
    ) -> Iterator[RequestOutput]:
        """Yield what is new of the completions, as it comes; `index` tells prompts apart."""
        yield from self._run(self._completions(prompts, sampling_params, RequestOutputKind.DELTA))

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
    ) -> Iterator[RequestOutput]:
        """Yield what is new of the answers, as it comes."""
        yield from self._run(self._chats(messages, sampling_params, RequestOutputKind.DELTA))

    def get_tokenizer(self) -> Any:
        """Return the tokenizer as `transformers` loads it."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model.folder)

    def close(self) -> None:
        """End all requests, and give back threads and memory."""
        self._dispose.detach()
        self._model.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _completions(
        self, prompts: Prompt | Sequence[Prompt], params: Params, kind: RequestOutputKind
    ) -> list[Call]:
        several: Sequence[Any] = [prompts] if _is_one(prompts) else prompts  # type: ignore[assignment]
        return self._model.completions(several, _spread(params, len(several)), kind)

    def _chats(
        self,
        messages: Sequence[Any],
        params: Params,
        kind: RequestOutputKind,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Call]:
        one = bool(messages) and isinstance(messages[0], Mapping)
        several = [messages] if one else messages
        return [
            self._model.chat(conversation, each, kind, options)
            for conversation, each in zip(several, _spread(params, len(several)), strict=True)
        ]

    def _whole(self, calls: list[Call], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        tokens = 0
        make_bar = use_tqdm if callable(use_tqdm) else Bar
        with make_bar(total=len(calls), desc="Completions", disable=not use_tqdm) as bar:
            for output in self._run(calls):
                outputs[output.index] = output
                tokens += sum(len(each.token_ids) for each in output.outputs)
                if use_tqdm:
                    elapsed_s = bar.format_dict["elapsed"]
                    bar.set_postfix_str(f"{tokens / elapsed_s:.0f} tokens/s", refresh=False)
                bar.update()
        return [outputs[number] for number in range(len(calls))]

    def _run(self, calls: list[Call]) -> Iterator[RequestOutput]:
        feed = Feed()
        run = self._model.engine.submit(calls, feed)
        try:
            yield from feed
        finally:  # an interrupt, an error, or a reader that has enough
            run.cancel()
            run.wait()


def _text_or_ids(prompt: Prompt) -> str | list[int]:
    """Raise `InvalidRequestError` for a prompt that is neither."""
    refusal = InvalidRequestError(
        'A prompt is a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.',
        param="prompt",
    )
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise refusal
        ((_, prompt),) = prompt.items()
    if isinstance(prompt, str):
        return prompt
    ids: Any = prompt
    try:
        return [token if type(token) is int else index(token) for token in ids]
    except TypeError:
        raise refusal from None


def _is_one(prompts: Any) -> bool:
    if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__getitem__"):
        return True  # `_text_or_ids` refuses what is no prompt
    return len(prompts) > 0 and isinstance(prompts[0], int)


def _spread(params: Params, count: int) -> Sequence[SamplingParams | None]:
    """Return the parameters of each prompt. Raises `InvalidRequestError`."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"There are {count} prompts and {len(params)} sampling parameters: give one for all, "
            "or one for each.",
            param="sampling_params",
        )
    return params
