"""The names of vLLM's `AsyncLLM` and of what belongs to it, in one place.

Importing this module imports vLLM, which takes seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from outrider.errors import ConfigError
from outrider.vllm.ahead_config import allow
from outrider.vllm.flags import check_hosting
from outrider.vllm.lora import read_adapters
from outrider.vllm.stats import Load

try:  # vLLM 0.23 raises ValueError
    from vllm.exceptions import VLLMClientError as ClientError
except ImportError:
    from vllm.exceptions import VLLMValidationError as ClientError

__all__ = ["ClientError", "EngineDeadError", "Facts", "build", "end_outputs", "facts", "stream"]


@dataclass(frozen=True, slots=True)
class Facts:
    """The limits and sizes that vLLM made of its flags."""

    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    num_speculative_tokens: int
    own_method: str | None
    """vLLM's own speculation; None: none, or proposers'."""


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> Any:
        raise ConfigError(f"vLLM's flags: {message}")


class _LoadLogger(StatLoggerBase):  # type: ignore[misc]
    """Passes what the scheduler says to a `Load`."""

    def __init__(self, load: Load, engine_index: int = 0) -> None:
        self._load = load
        self._engine = engine_index

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self._load.record(scheduler_stats, self._engine)

    def log_engine_initialized(self) -> None: ...


def build(argv: Sequence[str], load: Load) -> tuple[AsyncLLM, dict[str, LoRARequest]]:
    """Start vLLM by its own flags, and return its adapters by name.

    Raises `ConfigError`, and what vLLM raises.
    """
    allow()
    parser = AsyncEngineArgs.add_cli_args(_Parser())
    parser.add_argument("--lora-modules", nargs="+", action="extend", default=[])  # of its server
    given = parser.parse_args(list(argv))
    found = read_adapters(given.lora_modules, enabled=bool(given.enable_lora))
    adapters = {
        adapter.name: LoRARequest(adapter.name, number, adapter.path)
        for number, adapter in enumerate(found, 1)
    }
    args = AsyncEngineArgs.from_cli_args(given)
    if (args.speculative_config or {}).get("method") == "custom_class":  # in any spelling
        check_hosting(args.data_parallel_size, args.pipeline_parallel_size, args.nnodes)
    if args.speculative_config and hasattr(args, "per_request_spec_decode_metrics"):
        args.per_request_spec_decode_metrics = "detailed"
    factory: Any = lambda _config, engine_index: _LoadLogger(load, engine_index)  # noqa: E731
    # With it come the defaults of vLLM's own server, such as larger steps of prompts.
    context = UsageContext.OPENAI_API_SERVER
    llm = AsyncLLM.from_engine_args(args, usage_context=context, stat_loggers=[factory])
    return llm, adapters


def facts(llm: AsyncLLM) -> Facts:
    """Return what a started vLLM serves."""
    config = llm.vllm_config
    speculative = config.speculative_config
    method = None if speculative is None else str(speculative.method)
    return Facts(
        vocab_size=config.model_config.get_vocab_size(),
        max_model_len=config.model_config.max_model_len,
        page_size=config.cache_config.block_size,
        num_pages=config.cache_config.num_gpu_blocks or 0,
        num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens,
        own_method=None if method == "custom_class" else method,
    )


def stream(
    llm: AsyncLLM,
    request_id: str,
    prompt_token_ids: Sequence[int],
    fields: dict[str, Any],
    adapter: LoRARequest | None,
) -> AsyncGenerator[Any, None]:
    """Return vLLM's outputs of new tokens; closing or cancelling it aborts the request.

    `fields` are those of `SamplingParams`.
    """
    structured = fields.get("structured_outputs")
    given = {"structured_outputs": StructuredOutputsParams(**structured)} if structured else {}
    params = SamplingParams(**fields | given, output_kind=RequestOutputKind.DELTA)
    params.temperature = fields["temperature"]  # vLLM raises what is below 0.01
    prompt = TokensPrompt(prompt_token_ids=list(prompt_token_ids))
    outputs: AsyncGenerator[Any, None] = llm.generate(
        prompt, params, request_id=request_id, lora_request=adapter
    )
    return outputs


def end_outputs(llm: AsyncLLM) -> None:
    """End the task that reads the engine's outputs: it takes the engine's end for a failure."""
    if (task := getattr(llm, "output_handler", None)) is not None:
        with contextlib.suppress(RuntimeError):  # its loop has ended
            task.get_loop().call_soon_threadsafe(task.cancel)
