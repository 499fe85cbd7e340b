"""`--async-scheduling` with proposers: vLLM's configuration refuses it with any `custom_class`.

`allow` lets it pass for classes of ours that were asked for with it, and has all steps captured
whole. It does nothing else: without the flag vLLM decides as before. Importing this module imports
vLLM.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator
from typing import Any, Literal

import vllm.config.vllm as checks
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from outrider.errors import ConfigError
from outrider.vllm import versions

_METHOD = "custom_class"
_GRAPH_TOKENS = (1, 2, 4, *range(8, 128, 8), *range(128, 512, 16), *range(512, 1025, 64))
"""Sizes of captured steps, prompts beside drafts among them; vLLM's own end at 512."""


class AheadConfig(VllmConfig):  # type: ignore[misc]
    """A `VllmConfig` that passes its own check again, as in vLLM's other processes.

    Its class tells these where to find it.
    """

    def __post_init__(self) -> None:
        with _custom_class_passes():
            super().__post_init__()


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
        asked = copy.copy(self)
        asked.compilation_config = _captured_whole(self)
        with _custom_class_passes():
            config = create(asked, *args, **kwargs)
        if not config.scheduler_config.async_scheduling:
            raise ConfigError(
                "--async-scheduling takes no proposers here: vLLM turned it off for the device."
            )
        config.__class__ = AheadConfig
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


def _captured_whole(args: Any) -> Any:
    """Return the compilation with steps of prompts captured whole, unless a flag says otherwise.

    By default vLLM captures these in a piece per layer, and all rows wait while the host launches
    the pieces. Where the attention cannot be captured with prompts, vLLM says so and takes its
    default; attention over latents (MLA) can fail instead, and is left alone.
    """
    graphs = args.compilation_config
    decided = args.enforce_eager or args.cudagraph_capture_sizes or args.max_cudagraph_capture_size
    known = graphs.cudagraph_mode, graphs.cudagraph_capture_sizes, graphs.max_cudagraph_capture_size
    if decided or any(each is not None for each in known) or not current_platform.is_cuda():
        return graphs
    if args.create_model_config().use_mla:
        return graphs
    graphs = copy.deepcopy(graphs)
    graphs.cudagraph_mode, graphs.cudagraph_capture_sizes = CUDAGraphMode.FULL, [*_GRAPH_TOKENS]
    return graphs


def _refusal(args: Any) -> str:
    """Return why this version or these flags cannot be scheduled ahead; empty if they can."""
    if lacking := versions.missing_names() + versions.missing_names(versions.AHEAD):
        return f"this version of vLLM lacks {'; '.join(lacking)}."
    if args.pipeline_parallel_size > 1:
        return "vLLM does not schedule stages (--pipeline-parallel-size) ahead."
    if args.kv_transfer_config is not None:
        return "a text may lose tokens with --kv-transfer-config."
    return ""
