"""Small random models of every architecture that the engine serves or refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCAB_SIZE = 97
OMIT = object()  # leaves one of the common settings out

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def build_model(config_name: str, model_name: str, **changes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        settings = {k: v for k, v in {**_COMMON, **changes}.items() if v is not OMIT}
        config = getattr(transformers, config_name)(**settings)
        model: nn.Module = getattr(transformers, model_name)(config)
        return model

    return build


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "llama": build_model("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": build_model(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        use_sliding_window=True,
        sliding_window=7,
        layer_types=_HYBRID,
    ),
    # Heads of 32, here and below, because the compiled attention of a CPU needs them.
    "qwen3": build_model("Qwen3Config", "Qwen3ForCausalLM", head_dim=32),
    "mistral": build_model("MistralConfig", "MistralForCausalLM", sliding_window=9, head_dim=32),
    "gemma2": build_model(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        sliding_window=8,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3_text": build_model(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        sliding_window=8,
        query_pre_attn_scalar=8,
        layer_types=_HYBRID,
    ),
    "phi3": build_model("Phi3Config", "Phi3ForCausalLM", sliding_window=11, head_dim=32),
    "opt": build_model(
        "OPTConfig",
        "OPTForCausalLM",
        ffn_dim=48,
        word_embed_proj_dim=32,
        pad_token_id=0,
        num_key_value_heads=OMIT,
    ),
    "gpt2": build_model(
        "GPT2Config",
        "GPT2LMHeadModel",
        n_embd=32,
        n_head=4,
        n_layer=3,
        num_key_value_heads=OMIT,
    ),
    "deepseek_v3": build_model("DeepseekV3Config", "DeepseekV3ForCausalLM", **_MOE, **_MLA),
    "qwen3_moe": build_model("Qwen3MoeConfig", "Qwen3MoeForCausalLM", num_experts=4, **_MOE),
    "mixtral": build_model(
        "MixtralConfig", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2
    ),
    "gpt_oss": build_model(
        "GptOssConfig",
        "GptOssForCausalLM",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=_HYBRID,
    ),
    "gpt_neox": build_model("GPTNeoXConfig", "GPTNeoXForCausalLM", num_key_value_heads=OMIT),
    "glm4_moe": build_model(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        head_dim=32,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        **_MOE,
    ),
    "cohere2": build_model(
        "Cohere2Config", "Cohere2ForCausalLM", sliding_window=8, layer_types=_HYBRID
    ),
    "gemma4_text": build_model(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
        global_head_dim=16,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=8,
    ),
}

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "falcon": (
        build_model("FalconConfig", "FalconForCausalLM", head_dim=OMIT),
        "AttentionInterface",
    ),
    "bloom": (build_model("BloomConfig", "BloomForCausalLM", n_layer=2), "AttentionInterface"),
    "gptj": (
        build_model("GPTJConfig", "GPTJForCausalLM", n_embd=32, n_head=4, n_layer=2, rotary_dim=8),
        "AttentionInterface",
    ),
    "mpt": (
        build_model("MptConfig", "MptForCausalLM", d_model=32, n_heads=4),
        "AttentionInterface",
    ),
    "stablelm": (build_model("StableLmConfig", "StableLmForCausalLM"), "AttentionInterface"),
    "llama4": (
        build_model(
            "Llama4TextConfig",
            "Llama4ForCausalLM",
            intermediate_size_mlp=48,
            num_local_experts=2,
            attention_chunk_size=16,
        ),
        "chunked",
    ),
    "qwen3_5": (
        build_model(
            "Qwen3_5TextConfig",
            "Qwen3_5ForCausalLM",
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        "recurrent state",
    ),
    "gemma4 with shared keys": (
        build_model(
            "Gemma4TextConfig",
            "Gemma4ForCausalLM",
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            num_kv_shared_layers=1,
            vocab_size_per_layer_input=VOCAB_SIZE,
            hidden_size_per_layer_input=8,
        ),
        "share the keys",
    ),
}


def random_model(build: Callable[[], nn.Module], dtype: torch.dtype, seed: int = 1) -> nn.Module:
    """Build a model whose weights are large enough that attention decides the next token."""
    torch.manual_seed(seed)
    model = build()
    cast: Any = model
    if hasattr(cast, "set_experts_implementation"):
        cast.set_experts_implementation("eager")  # the grouped product does not support float64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                # With small embeddings the layers decide the next token, not the last token alone.
                embedding = "embed" in name or "wte" in name or "wpe" in name
                parameter.copy_(torch.randn_like(parameter) * (0.1 if embedding else 0.3))
    return model.to(dtype).eval()
