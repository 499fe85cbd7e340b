"""The names of vLLM that the plug-in touches, and what an installed version lacks of them.

Written for 0.23 (GPUs) and 0.32 (CPU build). `missing_names` says what another version moved.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

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
    "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.update_state": (
        *("self", "batch_update"),
    ),
    "vllm.distributed.parallel_state:get_tp_group": (),
    "vllm.distributed.parallel_state:GroupCoordinator.broadcast_object": ("self", "obj"),
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
    "vllm.v1.sample.metadata:SamplingMetadata": ("all_greedy", "all_random", "logitsprocs"),
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": ("num_draft_tokens",),
    "vllm.config:CompilationConfig": ("cudagraph_mode", "max_cudagraph_capture_size"),
    "vllm.config:VllmConfig": (
        *("additional_config", "compilation_config", "model_config", "parallel_config"),
        *("scheduler_config", "speculative_config"),
    ),
    "vllm.config:ModelConfig": (
        *("model", "tokenizer", "served_model_name", "max_model_len", "seed", "logprobs_mode"),
    ),
    "vllm.config:ParallelConfig": ("data_parallel_index",),
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
    "vllm.v1.sample.logits_processor.builtin": ("self.min_toks:",),
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


class Names(NamedTuple):
    """Names of vLLM that something needs."""

    parameters: Mapping[str, tuple[str, ...]]  # the first ones of functions, by path
    fields: Mapping[str, tuple[str, ...]]  # of classes, by path
    words: Mapping[str, tuple[str, ...]]
    """Attributes that exist only in instances, as the source of a module mentions them."""


PLUGIN: Final = Names(_PARAMETERS, _FIELDS, _SOURCE_WORDS)
"""What the plug-in and a scorer's engine need."""

AHEAD: Final = Names(
    {
        "vllm.engine.arg_utils:EngineArgs.create_engine_config": ("self",),
        "vllm.config:CompilationConfig.resolve_cudagraph_mode_and_sizes": (
            *("self", "min_cg_support"),
        ),
        "vllm.config:VllmConfig.__post_init__": ("self",),
        "vllm.distributed.parallel_state:GroupCoordinator.broadcast": ("self", "input_"),
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler.schedule": ("self",),
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler.update_from_output": (
            *("self", "scheduler_output", "model_runner_output"),
        ),
        "vllm.v1.outputs:DraftTokenIds": ("req_ids", "draft_token_ids"),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens": ("self", "grammar_output"),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.take_draft_token_ids": ("self",),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._preprocess": ("self", "scheduler_output"),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward": ("self", "input_ids"),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync": (
            *("self", "scheduler_output", "sampler_output"),
        ),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._calc_spec_decode_metadata": ("self",),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._copy_valid_sampled_token_count": (
            *("self", "next_token_ids", "valid_sampled_tokens_count"),
        ),
        "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.add_request": (
            "params",
            "_",
        ),
    },
    {
        "vllm.engine.arg_utils:EngineArgs": (
            *("async_scheduling", "speculative_config", "pipeline_parallel_size"),
            *("kv_transfer_config", "compilation_config"),
            *("cudagraph_capture_sizes", "max_cudagraph_capture_size"),
        ),
        "vllm.v1.core.sched.output:SchedulerOutput": (
            *(
                "total_num_scheduled_tokens",
                "scheduled_cached_reqs",
                "has_structured_output_requests",
            ),
            "pending_structured_output_tokens",
        ),
        "vllm.config:CompilationConfig": ("cudagraph_capture_sizes", "compile_sizes"),
        "vllm.config:ModelConfig": ("use_mla", "is_multimodal_model"),
        "vllm.config:SchedulerConfig": ("scheduler_cls",),
        "vllm.config:ParallelConfig": ("use_ubatching",),
        "vllm.config:CacheConfig": ("kv_sharing_fast_prefill",),
        "vllm.config:CUDAGraphMode": ("FULL", "FULL_AND_PIECEWISE"),
        "vllm.v1.attention.backend:AttentionCGSupport": ("ALWAYS",),
        "vllm.v1.core.sched.output:CachedRequestData": ("all_token_ids",),
        "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": (
            *("draft_token_ids", "logits_indices", "target_logits_indices"),
        ),
        "vllm.v1.sample.metadata:SamplingMetadata": ("output_token_ids",),
        "vllm.v1.worker.gpu_input_batch:CachedRequestState": (
            *("prompt_token_ids", "output_token_ids", "sampling_params", "num_tokens"),
        ),
    },
    {
        "vllm.config.vllm": ("get_args(NgramGPUTypes)",),
        "vllm.v1.worker.gpu_model_runner": (
            *("self.use_async_spec_decode", "self._draft_token_req_ids is not None"),
            *("self.input_ids =", "self.requests:", "_preprocess(\n", "self._model_forward("),
            *("self.supports_mm_inputs =", "self.enable_prompt_embeds =", "self.is_token_ids ="),
            "self.query_start_loc =",
            *("self.synchronize_input_prep(),", "self.prepare_inputs_event.synchronize()"),
            *("self.async_copy_ready_event =", "self.sampled_token_ids_cpu ="),
            *("self._invalid_req_indices =", "self._model_runner_output ="),
            "if self.input_batch.prev_sampled_token_ids is None:",
        ),
        "vllm.v1.core.sched.scheduler": ("self.running:", "if request.spec_token_ids:"),
        "vllm.v1.worker.gpu_input_batch": (
            *("self.spec_token_ids", "self.logitsprocs =", "self.num_prompt_tokens ="),
            "self.num_computed_tokens_cpu =",
        ),
    },
)
"""What `--async-scheduling` needs besides."""

STATES: Final = Names(
    {
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache": (
            *("self", "kv_cache_config"),
        ),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward": ("self", "input_ids"),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_kv_cache_spec": ("self",),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_eagle3_aux_layers_from_config": (
            "self",
        ),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._setup_eagle3_aux_hidden_state_outputs": (
            "self",
        ),
        "vllm.v1.worker.gpu_worker:Worker.determine_available_memory": ("self",),
        "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model": ("self",),
        "vllm.model_executor.models.interfaces:supports_eagle3": ("model",),
        "vllm.v1.core.kv_cache_utils:get_kv_cache_groups": ("vllm_config", "kv_cache_spec"),
    },
    {
        "vllm.v1.kv_cache_interface:KVCacheConfig": ("num_blocks", "kv_cache_groups"),
        "vllm.v1.kv_cache_interface:KVCacheGroupSpec": ("layer_names", "kv_cache_spec"),
        "vllm.v1.kv_cache_interface:KVCacheSpec": ("block_size", "page_size_bytes"),
        "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": ("kv_cache_specs",),
        "vllm.v1.worker.gpu_input_batch:CachedRequestState": ("block_ids", "num_computed_tokens"),
        "vllm.v1.worker.block_table:MultiGroupBlockTable": ("__getitem__",),
        "vllm.config:VllmConfig": ("kv_transfer_config", "compilation_config"),
        "vllm.config:CompilationConfig": ("mode",),
        "vllm.config:ParallelConfig": (
            *("pipeline_parallel_size", "decode_context_parallel_size"),
            "prefill_context_parallel_size",
        ),
        "vllm.config:ModelConfig": ("get_total_num_hidden_layers", "get_hidden_size"),
    },
    {
        "vllm.v1.worker.gpu_model_runner": (
            *("self.use_aux_hidden_state_outputs", "self.query_start_loc =", "self.requests:"),
            "hidden_states, aux_hidden_states = model_output",
        ),
        "vllm.v1.worker.block_table": ("self.slot_mapping =",),
    },
)
"""What `--hidden-features` needs besides."""


def missing_names(needed: Names = PLUGIN) -> list[str]:
    """Return what the installed vLLM lacks of the names that something needs."""
    missing = []
    for path, parameters in needed.parameters.items():
        found = _find(path)
        if found is None or tuple(inspect.signature(found).parameters)[: len(parameters)] != (
            parameters
        ):
            missing.append(f"{path}({', '.join(parameters)})")
    for path, fields in needed.fields.items():
        found = _find(path)
        known = set() if found is None else {*dir(found), *getattr(found, "__annotations__", ())}
        missing += [f"{path}.{name}" for name in fields if name not in known]
    for module, words in needed.words.items():
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
