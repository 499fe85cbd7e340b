"""`pipeline`: the same under LMDeploy's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from outrider.errors import ConfigError
from outrider.models.resolve import resolve_model
from outrider.models.tokenizer import Tokenizer
from outrider.offline.arguments import naming_arguments
from outrider.offline.llm import LLM
from outrider.offline.outputs import CompletionOutput, RequestOutput
from outrider.offline.params import SamplingParams

_NAMES = {
    "device": "device_type",
    "tensor_parallel_size": "tp",
    "max_model_len": "session_len",
    "max_num_seqs": "max_batch_size",
    "gpu_memory_utilization": "cache_max_entry_count",
    "max_num_batched_tokens": "max_prefill_token_num",
    "enforce_eager": "eager_mode",
    **{name: name for name in ("dtype", "block_size", "enable_prefix_caching")},
}
"""Arguments of `LLM` -> their names here."""
_NEUTRAL = {"quant_policy": 0, "dp": 1, "ep": 1, "adapters": None, "revision": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PytorchEngineConfig:
    """Settings of the engine. Raises `ConfigError`."""

    dtype: str = "auto"
    tp: int = 1
    session_len: int | None = None
    max_batch_size: int | None = None
    cache_max_entry_count: float | None = None
    """Part of the device's memory that may be used, here for weights, too."""
    block_size: int | None = None
    max_prefill_token_num: int | None = None
    enable_prefix_caching: bool = True
    device_type: str = "auto"
    eager_mode: bool = False
    quant_policy: int = 0
    dp: int = 1
    ep: int = 1
    adapters: None = None
    revision: None = None

    def __post_init__(self) -> None:
        for name, neutral in _NEUTRAL.items():
            if getattr(self, name) != neutral:
                raise ConfigError(f"{name} must be {neutral}: anything else is not supported.")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `LLM`."""
        given = {name: getattr(self, theirs) for name, theirs in _NAMES.items()}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """The drafting method and the draft tokens per round."""

    method: str
    model: str = ""
    num_speculative_tokens: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """Parameters of an answer: its sampling, and its end. Without `do_sample` it is greedy."""

    n: int = 1
    max_new_tokens: int = 512
    do_sample: bool = False
    top_p: float = 1.0
    top_k: int = 50
    min_p: float = 0.0
    temperature: float = 0.8
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    random_seed: int | None = None
    stop_words: Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    min_new_tokens: int | None = None
    logprobs: int | None = None
    response_format: Mapping[str, Any] | None = None

    def params(self) -> SamplingParams:
        """Return the same as `SamplingParams`. Raises `InvalidRequestError`."""
        same = ("n", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos", "logprobs")
        return SamplingParams(
            **{name: getattr(self, name) for name in same},
            max_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens or 0,
            temperature=self.temperature if self.do_sample else 0.0,
            seed=self.random_seed,
            stop=self.stop_words,
            stop_token_ids=self.stop_token_ids,
            extra_args={"response_format": self.response_format} if self.response_format else None,
        )


@dataclass(frozen=True, slots=True)
class Response:
    """An answer, or what is new of one."""

    text: str
    generate_token_len: int
    input_token_len: int
    finish_reason: str | None
    token_ids: list[int] = field(repr=False)
    logprobs: list[dict[int, float]] | None = field(default=None, repr=False)
    index: int = 0
    """Number of the prompt."""


class Pipeline:
    """Answers prompts. A text is a user's message where the model has a chat template."""

    def __init__(self, model_path: str, arguments: dict[str, Any]) -> None:
        self._llm = LLM(model_path, **arguments)
        folder = resolve_model(model_path, "target", tokenizer_only=True)
        self._chats = Tokenizer.load(folder).has_chat_template

    def __call__(
        self,
        prompts: Any,
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        do_preprocess: bool = True,
        use_tqdm: bool = False,
    ) -> Any:
        """Return the `Response` to one prompt (a text, or messages), or a list for several."""
        prompts, one = _listed(prompts)
        params = _params(gen_config)
        if self._as_chats(prompts, do_preprocess=do_preprocess):
            outputs = self._llm.chat(_messages(prompts), params, use_tqdm=use_tqdm)
        else:
            outputs = self._llm.generate(prompts, params, use_tqdm=use_tqdm)
        answers = [_response(output, choice) for output in outputs for choice in output.outputs]
        return answers[0] if one and len(answers) == 1 else answers

    def stream_infer(
        self,
        prompts: Any,
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        do_preprocess: bool = True,
    ) -> Iterator[Response]:
        """Yield what is new of the answers, as it comes."""
        prompts, _ = _listed(prompts)
        params = _params(gen_config)
        outputs = (
            self._llm.stream_chat(_messages(prompts), params)
            if self._as_chats(prompts, do_preprocess=do_preprocess)
            else self._llm.stream(prompts, params)
        )
        for output in outputs:
            for choice in output.outputs:
                yield _response(output, choice)

    def close(self) -> None:
        """End all requests, and give back threads and memory."""
        self._llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _as_chats(self, prompts: Sequence[Any], *, do_preprocess: bool) -> bool:
        if any(not isinstance(prompt, str) for prompt in prompts):
            return True
        return do_preprocess and self._chats


def pipeline(
    model_path: str,
    backend_config: PytorchEngineConfig | None = None,
    speculative_config: SpeculativeConfig | None = None,
    **others: Any,
) -> Pipeline:
    """Load a model. Raises `ConfigError` and `UnsupportedModelError`."""
    arguments = (backend_config or PytorchEngineConfig()).arguments()
    if speculative_config is not None:
        arguments["speculative_config"] = asdict(speculative_config)
    names = {name: theirs for name, theirs in _NAMES.items() if name not in others}
    with naming_arguments(names):
        return Pipeline(model_path, arguments | others)


def _listed(prompts: Any) -> tuple[list[Any], bool]:
    """Return a list of texts or conversations, and whether one was given by itself."""
    one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], Mapping))
    return [prompts] if one else list(prompts), one


def _messages(prompts: Sequence[Any]) -> list[list[Mapping[str, Any]]]:
    return [
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        for prompt in prompts
    ]


def _params(config: GenerationConfig | Sequence[GenerationConfig] | None) -> Any:
    if config is None or isinstance(config, GenerationConfig):
        return (config or GenerationConfig()).params()
    return [each.params() for each in config]


def _response(output: RequestOutput, choice: CompletionOutput) -> Response:
    logprobs = choice.logprobs
    return Response(
        text=choice.text,
        generate_token_len=len(choice.token_ids),
        input_token_len=len(output.prompt_token_ids),
        finish_reason=choice.finish_reason,
        token_ids=choice.token_ids,
        logprobs=(
            None
            if logprobs is None
            else [{token: entry.logprob for token, entry in each.items()} for each in logprobs]
        ),
        index=output.index,
    )
