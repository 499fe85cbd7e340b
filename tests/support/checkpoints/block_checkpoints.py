"""Small random checkpoints of block drafters, with the public names, for `eagle_checkpoints`'
target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.checkpoints import eagle_checkpoints as eagle

NUM_LAYERS = 3
BLOCK_SIZE = 7
LAYERS = (2, 5, 9)  # states that the module reads, of a target of 9 layers: 9 is the last's output
MASK_TOKEN = 96
_HEADS, _KV_HEADS, _INNER = 4, 2, 48
DFLASH: dict[str, Any] = {
    **eagle.LLAMA,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": NUM_LAYERS,
    "block_size": BLOCK_SIZE,
    "rope_theta": 700.0,
    "dflash_config": {
        "target_layer_ids": [layer - 1 for layer in LAYERS],
        "mask_token_id": MASK_TOKEN,
    },
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "block_size": BLOCK_SIZE,
    "aux_hidden_state_layer_ids": list(LAYERS),
    "mask_token_id": MASK_TOKEN,
    "draft_vocab_size": 40,
    "transformer_layer_config": {
        key: value for key, value in DFLASH.items() if key not in ("block_size", "dflash_config")
    },
}


def dflash_tensors(
    *,
    draft_vocab: int | None = None,
    hidden: int = eagle.HIDDEN_SIZE,
    vocab_size: int = eagle.VOCAB_SIZE,
    head_dim: int = 8,
) -> eagle.Tensors:
    """As `z-lab/*-DFlash-*`; with `draft_vocab` an output layer and maps as `speculators` saves."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    tensors = {
        "fc.weight": normal(hidden, len(LAYERS) * hidden),
        "hidden_norm.weight": 1 + normal(hidden),
        "norm.weight": 1 + normal(hidden),
    }
    for i in range(NUM_LAYERS):
        shapes = {
            "self_attn.q_proj": (_HEADS * head_dim, hidden),
            "self_attn.k_proj": (_KV_HEADS * head_dim, hidden),
            "self_attn.v_proj": (_KV_HEADS * head_dim, hidden),
            "self_attn.o_proj": (hidden, _HEADS * head_dim),
            "mlp.gate_proj": (_INNER, hidden),
            "mlp.up_proj": (_INNER, hidden),
            "mlp.down_proj": (hidden, _INNER),
        }
        tensors |= {f"layers.{i}.{name}.weight": normal(*size) for name, size in shapes.items()}
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
        tensors |= {f"layers.{i}.{name}.weight": 1 + normal(size) for name, size in norms.items()}
    if draft_vocab is not None:
        known = torch.randperm(vocab_size, generator=generator)[:draft_vocab].sort().values
        tensors["lm_head.weight"] = normal(draft_vocab, hidden)
        tensors["d2t"] = known - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, known, True)
    return tensors
