"""Body fields of OpenAI, vLLM, SGLang and TGI that Outrider does not act on.

A field at a value that asks for nothing is taken. Any other value is refused by name.
"""

from __future__ import annotations

from typing import Any, Final

# The names of OpenAI, vLLM, SGLang and TGI, by the values that ask for nothing besides null.
_REFUSED: Final = (
    *("audio", "verbosity", "web_search_options", "truncate_prompt_tokens", "logprob_token_ids"),
    *("allowed_token_ids", "chat_template", "request_id", "cache_salt", "repetition_detection"),
    *("thinking_token_budget", "prompt_embeds", "sampling_logprobs_mode", "thinking", "task"),
    *("stop_regex", "custom_logit_processor", "max_dynamic_patch", "min_dynamic_patch"),
    *("input_ids", "rid", "extra_key", "data_parallel_rank", "bootstrap_host", "bootstrap_port"),
    *("bootstrap_room", "tool_prompt", "guideline"),
)
_OFF: Final = (
    *("use_beam_search", "early_stopping", "watermarking", "include_stop_str_in_output"),
    *("continue_final_message", "return_mm_kwargs", "return_tokens_as_token_ids"),
    *("return_token_ids", "return_weight_versions", "return_token_offsets", "return_prompt_text"),
    *("return_hidden_states", "return_routed_experts", "return_cached_tokens_details"),
    *("return_spec_tokens_details", "return_prompt_token_ids", "return_meta_info"),
    *("return_input_ids_in_sglext", "return_output_ids_in_sglext", "return_sampling_mask"),
    *("return_flat_raw_output_top_logprobs", "no_stop_trim", "use_audio_in_video"),
    *("return_full_text", "decoder_input_details"),
)
_ON: Final = (
    *("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"),
    *("include_reasoning", "separate_reasoning", "stream_reasoning"),
)
_ZERO: Final = (
    *("priority", "routed_experts_prompt_start", "routed_experts_start_len", "top_a"),
    "mirostat_mode",
)
_EMPTY: Final = (
    *("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "kv_transfer_params"),
    *("ec_transfer_params", "vllm_xargs", "session_params", "custom_params", "images_config"),
    "video_config",
)

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(_REFUSED, ()),
    **dict.fromkeys(_OFF, (False,)),
    **dict.fromkeys(_ON, (True,)),
    **dict.fromkeys(_EMPTY, ({},)),
    **dict.fromkeys(("tools", "functions", "bad_words", "documents"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    **dict.fromkeys(("length_penalty", "typical_p", "tfs_z"), (1.0,)),
    "truncation_side": ("left", "right"),
    "mm_payload": ("none", "tensors"),
    **dict.fromkeys(_ZERO, (0,)),
    "stream_interval": (1,),
    "return_flat_raw_top_logprobs_b64": (True, False),
    "watermark": (False, {}),
}
NEUTRAL_IN: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    # The chat template writes the special tokens itself.
    "chat": {"echo": (False,), "best_of": (1,), "add_special_tokens": (False,), "suffix": ("",)},
    "text_completion": {"add_special_tokens": (True,)},
}
"""Fields whose meaning depends on the kind of request."""

HARMLESS: Final = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
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
