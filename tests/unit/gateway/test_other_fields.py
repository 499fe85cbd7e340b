"""Fields of vLLM 0.33, SGLang 0.5.23 and TGI 3: taken where they ask for nothing, else refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.openai.parse import parse
from gateway.openai.requests import ChatRequest, CompletionRequest, Request
from outrider.errors import InvalidRequestError

# Name -> a value that asks for nothing (the server's default), and one that asks for something.
# None as default: the server's is null. A missing second value: any value is harmless.
BOTH: dict[str, tuple[Any, ...]] = {
    # vLLM
    "use_beam_search": (False, True),
    "length_penalty": (1.0, 0.5),
    "watermarking": (None, True),
    "include_stop_str_in_output": (False, True),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "truncate_prompt_tokens": (None, 5),
    "truncation_side": ("left",),
    "logprob_token_ids": (None, [1]),
    "allowed_token_ids": (None, [1]),
    "bad_words": ([], ["a"]),
    "priority": (0, 1),
    "request_id": (None, "a"),
    "session_id": ("a",),
    "return_tokens_as_token_ids": (False, True),
    "return_token_ids": (False, True),
    "return_weight_versions": (False, True),
    "routed_experts_prompt_start": (0, 1),
    "return_token_offsets": (False, True),
    "mm_payload": ("tensors", "other"),
    "return_mm_kwargs": (False, True),
    "cache_salt": (None, "a"),
    "kv_transfer_params": ({}, {"a": 1}),
    "ec_transfer_params": (None, {"a": 1}),
    "vllm_xargs": ({}, {"a": 1}),
    "repetition_detection": (None, {}),
    "stream_interval": (1, 4),
    # SGLang
    "return_hidden_states": (False, "last"),
    "return_routed_experts": (False, True),
    "routed_experts_start_len": (0, 1),
    "return_cached_tokens_details": (False, True),
    "return_spec_tokens_details": (False, True),
    "json_schema": (None, "{}"),
    "regex": (None, "a"),
    "ebnf": (None, "a"),
    "stop_regex": (None, "a"),
    "no_stop_trim": (False, True),
    "lora_path": (None, "a"),
    "session_params": ({}, {"a": 1}),
    "custom_params": (None, {"a": 1}),
    "custom_logit_processor": (None, "a"),
    "watermark": (None, {"a": 1}),
    "images_config": (None, {"a": 1}),
    "mm_processor_kwargs": ({}, {"a": 1}),
    "data_parallel_rank": (None, 0),
    "rid": (None, "a"),
    "extra_key": (None, "a"),
    "custom_labels": ({"a": "b"},),
    "bootstrap_host": (None, "a"),
    # TGI, and servers that take its parameters
    "typical_p": (1.0, 0.5),
    "adapter_id": (None, "a"),
    "return_full_text": (False, True),
    "decoder_input_details": (False, True),
}
CHAT: dict[str, tuple[Any, ...]] = {
    "echo": (False, True),
    "best_of": (1, 2),
    "add_generation_prompt": (True, False),
    "continue_final_message": (False, True),
    "add_special_tokens": (False, True),
    "documents": ([], [{}]),
    "chat_template": (None, "a"),
    "media_io_kwargs": ({}, {"a": 1}),
    "return_prompt_text": (False, True),
    "return_prompt_token_ids": (False, True),
    "return_meta_info": (False, True),
    "return_input_ids_in_sglext": (False, True),
    "return_output_ids_in_sglext": (False, True),
    "return_sampling_mask": (False, True),
    "sampling_logprobs_mode": (None, "selected"),
    "return_flat_raw_output_top_logprobs": (False, True),
    "return_flat_raw_top_logprobs_b64": (True,),
    "task": (None, "action"),
    "max_dynamic_patch": (None, 1),
    "min_dynamic_patch": (None, 1),
    "use_audio_in_video": (False, True),
    "video_config": (None, {"a": 1}),
    "input_ids": (None, [1]),
    "tool_prompt": (None, "a"),
    "guideline": (None, "a"),
}
COMPLETION: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True, False),
    "prompt_embeds": (None, "a"),
    "thinking_token_budget": (None, 5),
}
CASES = [
    (kind, base, name, *values)
    for kind, base, own in (
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}]}, CHAT),
        (CompletionRequest, {"prompt": "x"}, COMPLETION),
    )
    for name, values in (BOTH | own).items()
]


def test_other_servers_fields_are_taken_where_they_ask_for_nothing() -> None:
    for kind, base, name, default, *_ in CASES:
        parse(kind, json.dumps(base | {name: default}).encode())  # raises if it is refused
        parse(kind, json.dumps(base | {name: None}).encode())


def test_other_servers_fields_that_ask_for_something_are_refused_by_name() -> None:
    for kind, base, name, _, *asking in CASES:
        for value in asking:
            with pytest.raises(InvalidRequestError) as refused:
                parse(kind, json.dumps(base | {name: value}).encode())
            assert refused.value.param == name
            assert name in refused.value.message
            assert "Unrecognized" not in refused.value.message


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_own_fields_that_are_null_are_taken(kind: type[Request]) -> None:
    needed = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    body = {name: needed.get(name) for name in kind.model_fields}
    parse(kind, json.dumps(body).encode())


def test_messages_with_clients_notes_are_taken_and_other_fields_named() -> None:
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "image_url": None}
    message = {"role": "user", "content": [part], "id": "m1", "timestamp": 3, "reasoning": None}
    (taken,) = parse(ChatRequest, {"messages": [message]}).messages
    assert taken.for_template() == {"role": "user", "content": "x"}
    with pytest.raises(InvalidRequestError) as refused:
        parse(ChatRequest, {"messages": [message | {"weight": 1}]})
    assert refused.value.param == "messages.0.weight"
