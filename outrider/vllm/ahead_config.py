"""`--async-scheduling` with proposers: vLLM's configuration refuses it with any `custom_class`.

`allow` lets it pass for classes of ours that were asked for with it, has a scheduler of ours leave
out draft tokens that nobody makes, and has steps with prompts captured whole where vLLM can. It
does nothing else: without the flag vLLM decides as before.
Importing this module imports vLLM.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, Literal

import vllm.config.vllm as checks
from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from outrider.errors import ConfigError
from outrider.vllm import versions

_METHOD = "custom_class"
_SCHEDULER = "outrider.vllm.ahead.scheduler.DraftRoomScheduler"
_GRAPH_TOKENS = (*range(8, 128, 8), *range(128, 512, 16), *range(512, 1025, 64))
"""Sizes of captured steps with prompts, beyond vLLM's own: those end at 512 or before."""


class AheadConfig(VllmConfig):  # type: ignore[misc]
    """A `VllmConfig` that passes its own check again, as in vLLM's other processes.

    Its class tells these where to find it.
    """

    def __post_init__(self) -> None:
        with _custom_class_passes():
            super().__post_init__()


class WholeSteps(CompilationConfig):  # type: ignore[misc]
    """Has steps with prompts captured whole, if the attention can be.

    By default vLLM captures these in a piece per layer, and all rows wait while the host launches
    the pieces. Its workers ask once they know the attention, and have compiled the pieces. With any
    other attention its default stays; asked for whole steps before, vLLM would fail, or capture
    none with prompts.
    """

    most_tokens = 0  # of a step, and of a text: vLLM captures prompts as long as the step

    def resolve_cudagraph_mode_and_sizes(
        self, min_cg_support: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return how steps are captured."""
        own: Any = self
        by_default = own.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE
        if by_default and min_cg_support.name == "ALWAYS":
            sizes = own.cudagraph_capture_sizes
            sizes = [*sizes, *[n for n in _GRAPH_TOKENS if sizes[-1] < n <= self.most_tokens]]
            own.cudagraph_mode = CUDAGraphMode.FULL
            own.cudagraph_capture_sizes, own.max_cudagraph_capture_size = sizes, sizes[-1]
        return super().resolve_cudagraph_mode_and_sizes(min_cg_support, *args, **kwargs)


@contextlib.contextmanager
def _custom_class_passes() -> Iterator[None]:
    """Count `custom_class` among the methods that can be scheduled ahead."""
    kept = checks.NgramGPUTypes
    checks.NgramGPUTypes = Literal["ngram_gpu", "custom_class"]
    try:
        yield
    finally:
        checks.NgramGPUTypes = kept


def allow() -> None:
    """Let flags with `--async-scheduling` and a proposer class of ours become a configuration.

    vLLM calls this in each of its processes, as a plug-in of the group `vllm.general_plugins`.
    """
    create = EngineArgs.create_engine_config
    if getattr(create, "allows_ahead", False):
        return

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _asks(self):
            return create(self, *args, **kwargs)
        if reason := _refusal(self):
            raise ConfigError(f"--async-scheduling takes no proposers here: {reason}")
        with _custom_class_passes():
            config = create(self, *args, **kwargs)
        if not config.scheduler_config.async_scheduling:
            raise ConfigError(
                "--async-scheduling takes no proposers here: vLLM turned it off for the device."
            )
        config.__class__ = AheadConfig
        # Ranks that schedule for themselves would not agree: only the first follows drafts.
        apart = config.parallel_config.distributed_executor_backend == "external_launcher"
        if config.scheduler_config.scheduler_cls is None and not apart:
            config.scheduler_config.scheduler_cls = _SCHEDULER
        _capture_whole(self, config)
        return config

    create_engine_config.allows_ahead = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def _asks(args: Any) -> bool:
    speculation = args.speculative_config or {}
    if not args.async_scheduling or speculation.get("method") != _METHOD:
        return False
    from outrider.vllm.proposer import RemoteProposer

    module, _, name = str(speculation.get("model")).rpartition(".")
    with contextlib.suppress(ImportError, AttributeError, ValueError):
        return issubclass(getattr(importlib.import_module(module), name), RemoteProposer)
    return False  # vLLM says what it says of any other class


def _capture_whole(args: Any, config: Any) -> None:
    """Have steps with prompts captured whole, unless a flag of vLLM's graphs says otherwise.

    Left alone is also what a graph of such steps would leave out: what a model does on the host for
    images, halves of a batch (`--enable-dbo`), and prompts that skip layers
    (`--kv-sharing-fast-prefill`). Attention over latents (MLA) can fail in one.
    """
    asked, graphs, model = args.compilation_config, config.compilation_config, config.model_config
    flags = (
        *(args.cudagraph_capture_sizes, args.max_cudagraph_capture_size, asked.cudagraph_mode),
        *(asked.cudagraph_capture_sizes, asked.max_cudagraph_capture_size, asked.compile_sizes),
    )
    left_alone = (
        *(model.is_multimodal_model, model.use_mla, config.parallel_config.use_ubatching),
        *(config.cache_config.kv_sharing_fast_prefill, not current_platform.is_cuda()),
    )
    most = min(config.scheduler_config.max_num_batched_tokens, model.max_model_len)
    short = most < max(graphs.cudagraph_capture_sizes or [0])
    if not short and not any(left_alone) and all(each is None for each in flags):
        graphs.__class__, graphs.most_tokens = WholeSteps, most


def _refusal(args: Any) -> str:
    """Return why this version or these flags cannot be scheduled ahead; empty if they can."""
    if lacking := versions.missing_names() + versions.missing_names(versions.AHEAD):
        return f"this version of vLLM lacks {'; '.join(lacking)}."
    if args.pipeline_parallel_size > 1:
        return "vLLM does not schedule stages (--pipeline-parallel-size) ahead."
    if args.kv_transfer_config is not None:
        return "a text may lose tokens with --kv-transfer-config."
    return ""
