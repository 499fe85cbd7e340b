"""Body fields of OpenAI, vLLM, SGLang and TGI that Outrider does not act on.

A field at a value that asks for nothing is taken. Any other value is refused by name.
"""

from __future__ import annotations

from typing import Any, Final

_OFF: Final = (False,)
_ON: Final = (True,)
_EMPTY: Final[tuple[Any, ...]] = ({},)
_NEVER: Final = ()  # only null asks for nothing

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    # OpenAI
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": _NEVER,
    "reasoning_effort": ("none",),
    "verbosity": _NEVER,
    "web_search_options": _NEVER,
    # vLLM
    "use_beam_search": _OFF,
    "length_penalty": (1.0,),
    "early_stopping": _OFF,
    "watermarking": _OFF,
    "include_stop_str_in_output": _OFF,
    "skip_special_tokens": _ON,
    "spaces_between_special_tokens": _ON,
    "truncate_prompt_tokens": _NEVER,
    "truncation_side": ("left", "right"),
    "logprob_token_ids": _NEVER,
    "allowed_token_ids": _NEVER,
    "bad_words": ([],),
    "add_generation_prompt": _ON,
    "continue_final_message": _OFF,
    "documents": ([],),
    "chat_template": _NEVER,
    "chat_template_kwargs": _EMPTY,
    "media_io_kwargs": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
    "mm_payload": ("none", "tensors"),
    "return_mm_kwargs": _OFF,
    "priority": (0,),
    "request_id": _NEVER,
    "return_tokens_as_token_ids": _OFF,
    "return_token_ids": _OFF,
    "return_weight_versions": _OFF,
    "return_token_offsets": _OFF,
    "return_prompt_text": _OFF,
    "routed_experts_prompt_start": (0,),
    "cache_salt": _NEVER,
    "kv_transfer_params": _EMPTY,
    "ec_transfer_params": _EMPTY,
    "vllm_xargs": _EMPTY,
    "repetition_detection": _NEVER,
    "stream_interval": (1,),
    "thinking_token_budget": _NEVER,
    "include_reasoning": _ON,
    "prompt_embeds": _NEVER,
    # SGLang
    "return_hidden_states": _OFF,
    "return_routed_experts": _OFF,
    "routed_experts_start_len": (0,),
    "return_cached_tokens_details": _OFF,
    "return_spec_tokens_details": _OFF,
    "return_prompt_token_ids": _OFF,
    "return_meta_info": _OFF,
    "return_input_ids_in_sglext": _OFF,
    "return_output_ids_in_sglext": _OFF,
    "return_sampling_mask": _OFF,
    "sampling_logprobs_mode": _NEVER,
    "return_flat_raw_output_top_logprobs": _OFF,
    "return_flat_raw_top_logprobs_b64": (True, False),
    "thinking": _NEVER,
    "task": _NEVER,
    "stop_regex": _NEVER,
    "no_stop_trim": _OFF,
    "session_params": _EMPTY,
    "custom_params": _EMPTY,
    "custom_logit_processor": _NEVER,
    "watermark": (False, {}),
    "images_config": _EMPTY,
    "video_config": _EMPTY,
    "max_dynamic_patch": _NEVER,
    "min_dynamic_patch": _NEVER,
    "use_audio_in_video": _OFF,
    "input_ids": _NEVER,
    "rid": _NEVER,
    "extra_key": _NEVER,
    "data_parallel_rank": _NEVER,
    "separate_reasoning": _ON,
    "stream_reasoning": _ON,
    "bootstrap_host": _NEVER,
    "bootstrap_port": _NEVER,
    "bootstrap_room": _NEVER,
    # TGI, and servers that take its parameters
    "tool_prompt": _NEVER,
    "guideline": _NEVER,
    "typical_p": (1.0,),
    "tfs_z": (1.0,),
    "top_a": (0,),
    "mirostat_mode": (0,),
    "return_full_text": _OFF,
    "decoder_input_details": _OFF,
}
NEUTRAL_IN: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    # The chat template writes the special tokens itself.
    "chat": {"echo": _OFF, "best_of": (1,), "add_special_tokens": _OFF, "suffix": ("",)},
    "text_completion": {"add_special_tokens": _ON},
}
"""Fields whose meaning depends on the kind of request."""

HARMLESS: Final = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "parallel_tool_calls"),
        *("session_id", "custom_labels"),
    }
)
"""Hints for other servers' routing and logs: any value is taken."""

INSTEAD: Final = {
    **{
        f"guided_{name}": f"structured_outputs.{name}"
        for name in ("json", "regex", "choice", "grammar")
    },
    "json_schema": "response_format",
    "functions": "tools",
    "function_call": "tool_choice",
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
    "request_id": "the header X-Request-Id",
    "rid": "the header X-Request-Id",
}
"""Names of fields -> what Outrider has in their place."""

LORA: Final = frozenset({"lora_path", "lora_request", "lora_id", "adapter_id", "adapter_source"})
