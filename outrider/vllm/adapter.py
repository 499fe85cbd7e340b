"""What the plug-in calls and replaces in vLLM; `versions` lists it.

vLLM is imported only where a function needs it, since its worker has loaded it by then.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from outrider.errors import ConfigError

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Served:
    """The target as vLLM's configuration names it."""

    model: str
    tokenizer: str
    served_model_name: str
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str  # cpu or cuda
    num_speculative_tokens: int
    max_num_seqs: int
    seed: int  # of requests without one
    replica: int  # the number of this one among data-parallel ones
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
        device=str(config.device_config.device_type),
        num_speculative_tokens=config.speculative_config.num_speculative_tokens,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        seed=model.seed or 0,
        replica=config.parallel_config.data_parallel_index,  # its rank is 0 in dense models
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


def captures_any_step(config: Any) -> bool:
    """Tell whether steps run as fast if only some of their rows have draft tokens.

    vLLM decides how it captures steps after it has loaded the model.
    """
    mode = config.compilation_config.cudagraph_mode
    return getattr(mode, "name", "NONE") in ("NONE", "FULL")


def leave_undrafted(output: Any, names: frozenset[str]) -> None:
    """Tell the scheduler, by the `ModelRunnerOutput` of a step, which requests have no drafts."""
    output.outrider_undrafted = names


def undrafted_in(output: Any) -> frozenset[str]:
    """Return the requests that have no drafts in the next step to be scheduled."""
    names: frozenset[str] = getattr(output, "outrider_undrafted", frozenset())
    return names


def schedules_ahead(config: Any) -> bool:
    """Tell whether vLLM schedules a step before it knows what the one before emits."""
    return bool(config.scheduler_config.async_scheduling)


def find_runner(drafter: object) -> Any:
    """Return the model runner that is loading `drafter`; None if no caller is one.

    A drafter is told neither its runner nor the names of rows, and the worker class that hands
    them over takes one more flag.
    """
    return _find_caller("drafter", drafter)


def find_worker(runner: object) -> Any:
    """Return the worker that is loading the model of a `runner`; None if no caller is one."""
    return _find_caller("model_runner", runner)


def _find_caller(attribute: str, value: object) -> Any:
    """Return the object with that attribute of which a method runs; None if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if caller is not value and getattr(caller, attribute, None) is value:
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

    @staticmethod
    def of(scheduler_output: Any) -> StepPlan:
        """Read a `SchedulerOutput`."""
        return StepPlan(
            new=scheduler_output.scheduled_new_reqs,
            finished=scheduler_output.finished_req_ids,
            verified=scheduler_output.scheduled_spec_decode_tokens,
            scheduled=scheduler_output.num_scheduled_tokens,
        )


class StepOutput(NamedTuple):
    """Holds what a step emitted, by row of its batch; nothing for a row within its prompt."""

    names: Sequence[str]
    emitted: Sequence[Sequence[int]]
    lengths: Sequence[int]  # of the rows' texts with that
    text: Callable[[int, int], list[int]]
    """Returns a row's text up to a length."""


def watch_steps(
    runner: Any, begin: Callable[[StepPlan], None], launched: Callable[[], None]
) -> None:
    """Call `begin` before each step of a model runner, and `launched` while its device works."""
    execute_model = runner.execute_model

    def watched(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        begin(StepPlan.of(scheduler_output))
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


def target_shape(config: Any) -> tuple[int, int]:
    """Return a target's layers, and the values of its hidden states."""
    model = config.model_config
    return int(model.get_total_num_hidden_layers()), int(model.get_hidden_size())


def without_states(config: Any) -> str:
    """Return why a `VllmConfig` computes states that cannot be kept in slots; empty if it can."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "only the last stage (--pipeline-parallel-size) hosts proposers."
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        return "ranks share positions (--decode-context-parallel-size)."
    if config.kv_transfer_config is not None:
        return "what --kv-transfer-config brings has keys and values only."
    return ""


def runs_eagerly(config: Any) -> bool:
    """Tell whether nothing compiles a target's layers, which then may change tensors in place."""
    return not config.compilation_config.mode  # CompilationMode.NONE


def hands_out_layers(model: Any) -> bool:
    """Tell whether vLLM can take states between layers out of a model."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    return bool(supports_eagle3(model))


def full_group(groups: Sequence[Any]) -> tuple[int, int]:
    """Return the first group of layers that keeps all positions of a text, and its page size.

    Raises `ConfigError` if there is none.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for i, group in enumerate(groups):
        spec = group.kv_cache_spec
        layers = getattr(spec, "kv_cache_specs", {"": spec})  # by name, where they differ in width
        if all(isinstance(each, FullAttentionSpec) for each in layers.values()):
            return i, int(spec.block_size)
    raise ConfigError(
        "--hidden-features cannot be kept: no layer of the target keeps all positions of a text."
    )


def page_of(runner: Any) -> tuple[int, int]:
    """Return the bytes of a page of keys and values in all layers that share it, and its tokens."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    groups = get_kv_cache_groups(runner.vllm_config, runner.get_kv_cache_spec())
    _, page_size = full_group(groups)
    sizes = [
        group.kv_cache_spec.page_size_bytes
        * (1 if hasattr(group.kv_cache_spec, "kv_cache_specs") else len(group.layer_names))
        for group in groups
    ]
    return max(sizes), page_size


def draft_token_ids(names: list[str], drafts: list[list[int]]) -> Any:
    """Return draft tokens by request as a model runner hands them out."""
    from vllm.v1.outputs import DraftTokenIds

    return DraftTokenIds(names, drafts)


def draft_places(metadata: Any) -> Any:
    """Return where draft tokens are among a step's tokens, by its `SpecDecodeMetadata`.

    int64 [draft tokens], on the device. A draft token follows the one whose logits verify it.
    """
    return metadata.logits_indices[metadata.target_logits_indices + 1].long()


def tensor_parallel_rank() -> int:
    """Return this process's rank among those that share each layer."""
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)


def agreed(value: Value) -> Value:
    """Return what tensor-parallel rank 0 gives, on every rank: all of them call it in one order.

    Ranks that verified different drafts would go on with different texts.
    """
    from vllm.distributed.parallel_state import get_tp_group

    given: Value = get_tp_group().broadcast_object(value)
    return given


def share(tokens: Any) -> None:
    """Overwrite a tensor with tensor-parallel rank 0's on each rank: one shape and dtype on all.

    GPUs do so in order with their other work, and no host waits.
    """
    from vllm.distributed.parallel_state import get_tp_group

    get_tp_group().broadcast(tokens)


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
