"""Every name of vLLM that the plug-in touches.

Written for 0.23 (GPUs) and 0.32 (CPU build). `missing_names` says what another version moved.
vLLM is imported only where a function needs it, since its worker has loaded it by then.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

SUPPORTED: Final = ("0.23", "0.32")
"""Versions whose names and signatures were checked."""

_PARAMETERS: Final = {
    "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer": ("vllm_config",),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.load_model": ("self",),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": ("self", "scheduler_output"),
    "vllm.v1.worker.gpu_worker:Worker.load_model": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.shutdown": ("self",),
    "vllm.v1.sample.sampler:Sampler.sample": ("self", "logits", "sampling_metadata"),
    "vllm.v1.sample.rejection_sampler:RejectionSampler.forward": (
        *("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
    ),
    "vllm.v1.sample.rejection_sampler:RejectionSampler.apply_logits_processors": (
        *("self", "logits", "sampling_metadata", "metadata"),
    ),
    "vllm.distributed.parallel_state:get_tp_group": (),
    # The engine of a scorer (async_llm.py):
    "vllm.v1.engine.async_llm:AsyncLLM.from_engine_args": (
        *("engine_args", "start_engine_loop", "usage_context", "stat_loggers"),
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": (
        *("self", "prompt", "sampling_params", "request_id"),
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.add_lora": ("self", "lora_request"),
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": ("self", "method", "timeout", "args"),
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown": ("self", "timeout"),
    "vllm.v1.metrics.loggers:StatLoggerBase.record": (
        *("self", "scheduler_stats", "iteration_stats"),
    ),
}
"""First parameters of functions that are called or replaced."""

_FIELDS: Final = {
    "vllm.usage.usage_lib:UsageContext": ("OPENAI_API_SERVER",),
    "vllm.outputs:CompletionOutput": ("token_ids", "logprobs", "finish_reason"),
    "vllm.v1.metrics.stats:SchedulerStats": (
        *("num_running_reqs", "num_waiting_reqs", "kv_cache_usage", "spec_decoding_stats"),
    ),
    "vllm.v1.metrics.stats:RequestStateStats": (
        *("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"),
    ),
    "vllm.v1.spec_decode.metrics:SpecDecodingStats": (
        *("num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos"),
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        *("scheduled_new_reqs", "finished_req_ids", "num_scheduled_tokens"),
        "scheduled_spec_decode_tokens",
    ),
    "vllm.v1.core.sched.output:NewRequestData": ("req_id", "prompt_token_ids", "sampling_params"),
    "vllm.v1.sample.metadata:SamplingMetadata": ("all_greedy", "all_random"),
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": ("num_draft_tokens",),
    "vllm.config:CompilationConfig": ("cudagraph_mode", "max_cudagraph_capture_size"),
    "vllm.config:VllmConfig": (
        *("additional_config", "compilation_config", "model_config", "parallel_config"),
        *("scheduler_config", "speculative_config"),
    ),
    "vllm.config:ModelConfig": (
        *("model", "tokenizer", "served_model_name", "max_model_len", "seed", "logprobs_mode"),
    ),
    "vllm.sampling_params:SamplingParams": (
        *("temperature", "top_k", "top_p", "seed", "max_tokens", "ignore_eos", "extra_args"),
        *(
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "stop_token_ids",
            "eos_token_id",
        ),
    ),
}
"""Fields of dataclasses that are read."""

_SOURCE_WORDS: Final = {
    "vllm.v1.engine.async_llm": ("self.output_handler = asyncio.create_task(",),
    "vllm.outputs": ("self.prompt_logprobs =", "self.num_cached_tokens =", "self.metrics ="),
    "vllm.v1.worker.gpu_model_runner": (
        *("self.drafter.load_model(self.model)", "self.input_batch.token_ids_cpu"),
        *("self.input_batch.num_tokens_no_spec", "self.rejection_sampler(", "self.sampler("),
        *("def _sample(", "def _bookkeeping_sync(", "self.discard_request_mask ="),
    ),
    "vllm.v1.worker.gpu_input_batch": (
        *("self.temperature_cpu =", "self.top_k_cpu =", "self.top_p_cpu =", "def req_ids"),
        "self.generators:",
    ),
}
"""Attributes that exist only in instances, as the source mentions them."""


def missing_names() -> list[str]:
    """Return what the installed vLLM lacks of the names that the plug-in needs."""
    missing = []
    for path, parameters in _PARAMETERS.items():
        found = _find(path)
        if found is None or tuple(inspect.signature(found).parameters)[: len(parameters)] != (
            parameters
        ):
            missing.append(f"{path}({', '.join(parameters)})")
    for path, fields in _FIELDS.items():
        found = _find(path)
        known = set() if found is None else {*dir(found), *getattr(found, "__annotations__", ())}
        missing += [f"{path}.{name}" for name in fields if name not in known]
    for module, words in _SOURCE_WORDS.items():
        source = inspect.getsource(importlib.import_module(module))
        missing += [f"{module}: {word}" for word in words if word not in source]
    return missing


def untried() -> str:
    """Return what to say of a vLLM of another version than those in `SUPPORTED`; else nothing."""
    version = str(getattr(importlib.import_module("vllm"), "__version__", "of no version"))
    if version.startswith(SUPPORTED):
        return ""
    return f"vLLM {version} was not tried with Outrider: {' and '.join(SUPPORTED)} were."


def _find(path: str) -> Any:
    module, _, names = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return None
    return found


@dataclass(frozen=True, slots=True)
class Served:
    """The target as vLLM's configuration names it."""

    model: str
    tokenizer: str
    served_model_name: str
    vocab_size: int
    max_model_len: int
    dtype: str
    num_speculative_tokens: int
    max_num_seqs: int
    seed: int  # of requests without one
    data_parallel_rank: int
    flags: str
    """The plug-in's own flags: `--additional-config '{"outrider": "..."}'`."""


def read_config(config: Any) -> Served:
    """Return what the plug-in needs of a `VllmConfig`."""
    model = config.model_config
    names = model.served_model_name
    return Served(
        model=model.model,
        tokenizer=model.tokenizer,
        served_model_name=names if isinstance(names, str) else names[0],
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        dtype=str(model.dtype).removeprefix("torch."),
        num_speculative_tokens=config.speculative_config.num_speculative_tokens,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        seed=model.seed or 0,
        data_parallel_rank=config.parallel_config.data_parallel_rank,
        flags=str((config.additional_config or {}).get("outrider", "")),
    )


def max_graph_rows(config: Any) -> int:
    """Return up to how many rows run in one CUDA graph if all have as many draft tokens.

    With drafts of other lengths vLLM runs attention apart from graphs. 0 if it has no such graphs.
    """
    compilation = config.compilation_config
    if "FULL" not in getattr(compilation.cudagraph_mode, "name", ""):
        return 0
    query_len = 1 + int(config.speculative_config.num_speculative_tokens)
    return int(compilation.max_cudagraph_capture_size or 0) // query_len


def find_runner(drafter: object) -> Any:
    """Return the model runner that is loading `drafter`; None if no caller is one.

    A drafter is told neither its runner nor the names of rows, and the worker class that hands
    them over takes one more flag.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if caller is not drafter and getattr(caller, "drafter", None) is drafter:
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What vLLM's scheduler says of a step before it runs."""

    new: Sequence[Any]
    """`NewRequestData` of requests that run for the first time."""
    finished: Collection[str]  # requests that ended since the last step, or were aborted
    verified: Mapping[str, Sequence[int]]  # draft tokens by request
    scheduled: Mapping[str, int]  # tokens by request; none: nothing runs


def watch_steps(
    runner: Any, begin: Callable[[StepPlan], None], launched: Callable[[], None]
) -> None:
    """Call `begin` before each step of a model runner, and `launched` while its device works."""
    execute_model = runner.execute_model

    def watched(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        begin(
            StepPlan(
                new=scheduler_output.scheduled_new_reqs,
                finished=scheduler_output.finished_req_ids,
                verified=scheduler_output.scheduled_spec_decode_tokens,
                scheduled=scheduler_output.num_scheduled_tokens,
            )
        )
        output = execute_model(scheduler_output, *args, **kwargs)
        launched()
        return output

    runner.execute_model = watched


def keep_cpu_generators(runner: Any) -> None:
    """Let a model runner on a CPU sample rows with seeds whose prompts are computed in parts.

    Behind a part vLLM takes a row's draw back by its generator's offset. A CPU's has none, and
    asking for it ends the engine. So the state from before the draw is put back instead.
    """
    if getattr(runner.device, "type", "") != "cpu" or not hasattr(runner, "discard_request_mask"):
        return
    sample, keep_books = runner._sample, runner._bookkeeping_sync

    def discarded() -> dict[int, Any]:
        batch = runner.input_batch
        rows = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist()
        return {row: batch.generators[row] for row in rows if row in batch.generators}

    def sampled(*args: Any, **kwargs: Any) -> Any:
        states = [(each, each.get_state()) for each in discarded().values()]
        output = sample(*args, **kwargs)
        for each, state in states:
            each.set_state(state)
        return output

    def booked(*args: Any, **kwargs: Any) -> Any:
        generators, hidden = runner.input_batch.generators, discarded()
        for row in hidden:
            del generators[row]
        output = keep_books(*args, **kwargs)
        generators.update(hidden)
        return output

    runner._sample, runner._bookkeeping_sync = sampled, booked


def tensor_parallel_rank() -> int:
    """Return this process's rank among those that share each layer."""
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)


def shared_drafts(drafts: list[list[int]], num_rows: int, most: int) -> list[list[int]]:
    """Return the drafts of tensor-parallel rank 0 on every rank, through the ranks' CPU group.

    Ranks that verified different drafts would go on with different texts.
    """
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return drafts
    import torch

    table = np.full((num_rows, most), -1, dtype=np.int64)
    for row, draft in enumerate(drafts):
        table[row, : len(draft)] = draft
    torch.distributed.broadcast(torch.from_numpy(table), src=group.ranks[0], group=group.cpu_group)
    return [[token for token in row if token >= 0] for row in table.tolist()]


def seed_of(request_id: str, seed: int | None, default: int) -> int:
    """Return the seed of a request's noise, equal on all ranks, also if the client gave none."""
    if seed is not None:
        return seed % 2**64
    return int.from_bytes(hashlib.blake2b(f"{default} {request_id}".encode()).digest()[:8], "big")


def log_with_vllm() -> None:
    """Send the draft side's log records the way of vLLM's own."""
    for name in ("outrider", "scorer_service"):
        logging.getLogger(name).parent = logging.getLogger("vllm")


def worker_class(device: str) -> Any:
    """Return vLLM's own worker class for "cuda" or "cpu"."""
    if device == "cpu":
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker
