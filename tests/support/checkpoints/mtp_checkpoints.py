"""Small random checkpoints of multi-token prediction heads, with the names of the public ones.

The names, shapes and conventions are those of the published formats; only the sizes are small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB_SIZE = 97
HIDDEN_SIZE = 32
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 8
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,  # small, so that positions matter within a short text
    "tie_word_embeddings": False,
}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "norm_topk_prob": True,
}

_ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


@dataclass
class MtpCheckpoint:
    """A head's config.json and tensors, and those of the target that it may share with."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target_config: dict[str, Any] = field(default_factory=dict)
    target_tensors: dict[str, Tensor] = field(default_factory=dict)

    def write(self, folder: Path) -> tuple[Path, Path]:
        """The head's folder and the target's; one folder if the target holds the head itself."""
        if not self.target_tensors:
            return write_folder(folder / "full", self.config, self.tensors), folder / "full"
        head = write_folder(folder / "head", self.config, self.tensors)
        target = write_folder(folder / "target", self.target_config, self.target_tensors)
        return head, target


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """config.json and two shards of safetensors with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for shard, held in shards.items():
        save_file({name: tensors[name].contiguous() for name in held}, folder / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


class _Weights:
    """Random tensors by name; the same ones for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}

    def matrix(self, name: str, *shape: int) -> None:
        scale = shape[-1] ** -0.5
        self.tensors[name] = torch.randn(*shape, generator=self._generator) * scale

    def norm(self, name: str, size: int, centre: float = 1.0) -> None:
        self.tensors[name] = centre + 0.3 * torch.randn(size, generator=self._generator)

    def dense(self, prefix: str, hidden: int, inner: int) -> None:
        self.matrix(f"{prefix}.gate_proj.weight", inner, hidden)
        self.matrix(f"{prefix}.up_proj.weight", inner, hidden)
        self.matrix(f"{prefix}.down_proj.weight", hidden, inner)

    def shared(self, embed_name: str = "model.embed_tokens.weight", *, head: bool = True) -> None:
        """A target's embedding and head."""
        self.tensors[embed_name] = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=self._generator)
        if head:
            self.matrix("lm_head.weight", VOCAB_SIZE, HIDDEN_SIZE)
            self.tensors["lm_head.weight"] *= 8  # logits that differ


def _target() -> Any:
    weights = _Weights(seed=1000)
    weights.shared()
    config = {**_COMMON, "model_type": "llama", "num_hidden_layers": 2}
    return config, weights.tensors


def deepseek(*, num_modules: int = 1, in_target: bool = True, **changes: Any) -> MtpCheckpoint:
    """DeepSeek-V3's layers N, N + 1, ... of a full checkpoint, or a NextN export of one layer."""
    config = {
        **_COMMON,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM" if in_target else "DeepseekV3ForCausalLMNextN"],
        "num_hidden_layers": 3 if in_target else 1,
        "num_nextn_predict_layers": num_modules,
        "first_k_dense_replace": 1,
        "num_key_value_heads": _HEADS,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 6,
        "v_head_dim": 10,
        **_ROUTED,
        **changes,
    }
    config.pop("head_dim")
    weights = _Weights()
    first = config["num_hidden_layers"] if in_target else 0
    for layer in range(first, first + num_modules):
        _deepseek_layer(weights, f"model.layers.{layer}", config)
    if in_target:
        weights.shared()
        weights.tensors["model.layers.0.input_layernorm.weight"] = torch.ones(HIDDEN_SIZE)
        return MtpCheckpoint(config, weights.tensors)
    return MtpCheckpoint(config, weights.tensors, *_target())


def glm4_moe() -> MtpCheckpoint:
    """GLM-4.5's: DeepSeek's names around grouped-query attention with biases and norms."""
    config = {
        **_COMMON,
        "model_type": "glm4_moe",
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        **_ROUTED,
    }
    weights = _Weights()
    prefix = "model.layers.3"
    _deepseek_frame(weights, prefix, config)
    attn, dim = f"{prefix}.self_attn", _HEAD_DIM
    for name, rows in (("q", _HEADS * dim), ("k", _KV_HEADS * dim), ("v", _KV_HEADS * dim)):
        weights.matrix(f"{attn}.{name}_proj.weight", rows, HIDDEN_SIZE)
        weights.norm(f"{attn}.{name}_proj.bias", rows, 0.0)
    weights.matrix(f"{attn}.o_proj.weight", HIDDEN_SIZE, _HEADS * dim)
    weights.norm(f"{attn}.q_norm.weight", dim)
    weights.norm(f"{attn}.k_norm.weight", dim)
    weights.shared()
    return MtpCheckpoint(config, weights.tensors)


def _deepseek_frame(weights: _Weights, prefix: str, config: dict[str, Any]) -> None:
    """All of a layer but its attention."""
    hidden, mlp = HIDDEN_SIZE, f"{prefix}.mlp"
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights.norm(f"{prefix}.{name}.weight", hidden)
    weights.matrix(f"{prefix}.eh_proj.weight", hidden, 2 * hidden)
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights.norm(f"{prefix}.{name}.weight", hidden)
    weights.matrix(f"{mlp}.gate.weight", config["n_routed_experts"], hidden)
    weights.norm(f"{mlp}.gate.e_score_correction_bias", config["n_routed_experts"], 0.0)
    for expert in range(config["n_routed_experts"]):
        weights.dense(f"{mlp}.experts.{expert}", hidden, config["moe_intermediate_size"])
    weights.dense(f"{mlp}.shared_experts", hidden, config["moe_intermediate_size"])


def _deepseek_layer(weights: _Weights, prefix: str, config: dict[str, Any]) -> None:
    hidden, heads = HIDDEN_SIZE, _HEADS
    rope, nope, value = 8, config["qk_nope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    attn = f"{prefix}.self_attn"
    _deepseek_frame(weights, prefix, config)
    weights.matrix(f"{attn}.q_a_proj.weight", q_rank, hidden)
    weights.norm(f"{attn}.q_a_layernorm.weight", q_rank)
    weights.matrix(f"{attn}.q_b_proj.weight", heads * (nope + rope), q_rank)
    weights.matrix(f"{attn}.kv_a_proj_with_mqa.weight", kv_rank + rope, hidden)
    weights.norm(f"{attn}.kv_a_layernorm.weight", kv_rank)
    weights.matrix(f"{attn}.kv_b_proj.weight", heads * (nope + value), kv_rank)
    weights.matrix(f"{attn}.o_proj.weight", hidden, heads * value)


def qwen(
    kind: str, *, fused_experts: bool = True, tied: bool = False, **changes: Any
) -> MtpCheckpoint:
    """Qwen's `mtp.*`: kind "qwen3_next", "qwen3_5_moe" (both with experts) or "qwen3_5" (dense).

    Qwen3.5's config nests the language model's; its embedding has another name.
    """
    text = {
        **_COMMON,
        "num_hidden_layers": 4,
        "tie_word_embeddings": tied,
        "partial_rotary_factor": 0.5,
        **({} if kind == "qwen3_5" else _MOE),
        **changes,
    }
    weights = _Weights()
    embed_name = "model.embed_tokens.weight"
    if kind == "qwen3_next":
        config = {"model_type": kind, "num_nextn_predict_layers": 1, **text}
    else:
        nested = {"model_type": f"{kind}_text", "mtp_num_hidden_layers": 1, **text}
        config = {"model_type": kind, "text_config": nested, "tie_word_embeddings": tied}
        embed_name = "model.language_model.embed_tokens.weight"
    hidden = HIDDEN_SIZE
    weights.matrix("mtp.fc.weight", hidden, 2 * hidden)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        weights.norm(f"mtp.{name}.weight", hidden, 0.0)
    layer, attn, mlp = "mtp.layers.0", "mtp.layers.0.self_attn", "mtp.layers.0.mlp"
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights.norm(f"{layer}.{name}.weight", hidden, 0.0)
    weights.matrix(f"{attn}.q_proj.weight", 2 * _HEADS * _HEAD_DIM, hidden)
    weights.matrix(f"{attn}.k_proj.weight", _KV_HEADS * _HEAD_DIM, hidden)
    weights.matrix(f"{attn}.v_proj.weight", _KV_HEADS * _HEAD_DIM, hidden)
    weights.matrix(f"{attn}.o_proj.weight", hidden, _HEADS * _HEAD_DIM)
    weights.norm(f"{attn}.q_norm.weight", _HEAD_DIM, 0.0)
    weights.norm(f"{attn}.k_norm.weight", _HEAD_DIM, 0.0)
    if kind == "qwen3_5":
        weights.dense(mlp, hidden, text["intermediate_size"])
    else:
        inner, experts = text["moe_intermediate_size"], text["num_experts"]
        weights.matrix(f"{mlp}.gate.weight", experts, hidden)
        if fused_experts:
            weights.matrix(f"{mlp}.experts.gate_up_proj", experts, 2 * inner, hidden)
            weights.matrix(f"{mlp}.experts.down_proj", experts, hidden, inner)
        else:
            for expert in range(experts):
                weights.dense(f"{mlp}.experts.{expert}", hidden, inner)
        weights.dense(f"{mlp}.shared_expert", hidden, text["shared_expert_intermediate_size"])
        weights.matrix(f"{mlp}.shared_expert_gate.weight", 1, hidden)
    weights.shared(embed_name, head=not tied)
    return MtpCheckpoint(config, weights.tensors)


def rtp_qwen2(
    *, num_modules: int = 1, draft_ids: list[int] | None = None, **changes: Any
) -> MtpCheckpoint:
    """RTP-LLM's `qwen_2-mtp`, with its own embedding and head; `draft_ids`: its vocabulary."""
    config = {
        **_COMMON,
        "model_type": "qwen2",
        "num_hidden_layers": num_modules,
        **changes,
    }
    config.pop("head_dim")  # Qwen2 derives it
    hidden, dim = HIDDEN_SIZE, _HEAD_DIM
    weights = _Weights()
    for i in range(num_modules):
        layer, attn = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        for name in ("e_norm", "h_norm", "final_head.norm"):
            weights.norm(f"{layer}.{name}.weight", hidden)
        weights.matrix(f"{layer}.eh_proj.weight", 2 * hidden, hidden)  # used as y = x @ W
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights.norm(f"{layer}.{name}.weight", hidden)
        for name, rows in (("q", _HEADS * dim), ("k", _KV_HEADS * dim), ("v", _KV_HEADS * dim)):
            weights.matrix(f"{attn}.{name}_proj.weight", rows, hidden)
            weights.norm(f"{attn}.{name}_proj.bias", rows, 0.0)
        weights.matrix(f"{attn}.o_proj.weight", hidden, _HEADS * dim)
        weights.dense(f"{layer}.mlp", hidden, config["intermediate_size"])
    weights.shared()
    if draft_ids is not None:
        head = weights.tensors["lm_head.weight"]
        weights.tensors["lm_head.weight"] = head[: len(draft_ids)].clone()
        weights.tensors["model.d2t"] = torch.tensor(draft_ids)
        weights.tensors["model.t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    return MtpCheckpoint(config, weights.tensors, *_target())


def to_block_fp8(checkpoint: MtpCheckpoint, block: int = 128) -> MtpCheckpoint:
    """The layers' matrices as float8 e4m3 with a float32 factor per block, as DeepSeek stores them.

    Norms, the router, `eh_proj`, embedding and head stay as they are.
    """
    plain = ("embed_tokens", "lm_head", "eh_proj", "mlp.gate.")
    tensors: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        if tensor.dim() != 2 or any(part in name for part in plain):
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        factors = torch.empty(-(-rows // block), -(-columns // block))
        stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        for i in range(factors.shape[0]):
            for j in range(factors.shape[1]):
                part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
                factors[i, j] = tensor[part].abs().max() / 448
                stored[part] = (tensor[part] / factors[i, j]).to(torch.float8_e4m3fn)
        tensors[name] = stored
        tensors[f"{name}_scale_inv"] = factors
    config = {
        **checkpoint.config,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]},
    }
    return MtpCheckpoint(config, tensors, checkpoint.target_config, checkpoint.target_tensors)
