"""Small random checkpoints of block drafters, with the public names, for `eagle_checkpoints`'
target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.checkpoints import eagle_checkpoints as eagle

NUM_LAYERS = 3
RANK = 6
BLOCK_SIZE = 7
LAYERS = (2, 5, 9)  # states that the module reads, of a target of 9 layers: 9 is the last's output
MASK_TOKEN = 96
_HEADS, _INNER = 4, 48
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
    kv_heads: int = 2,
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
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
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


DSPARK: dict[str, Any] = {
    **{key: value for key, value in DFLASH.items() if key != "dflash_config"},
    **DFLASH["dflash_config"],
    "architectures": ["Qwen3DSparkModel"],
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


DSPARK_RNN: dict[str, Any] = {**DSPARK, "markov_head_type": "rnn"}


def dspark_tensors(
    *, draft_vocab: int | None = None, markov: str = "vanilla", **sizes: int
) -> eagle.Tensors:
    """As DeepSpec saves it, with an embedding and an output layer of its own."""
    tensors = dflash_tensors(draft_vocab=draft_vocab, **sizes)
    generator = torch.Generator().manual_seed(12)
    hidden = len(tensors["norm.weight"])
    vocab_size = sizes.get("vocab_size", eagle.VOCAB_SIZE)
    shapes = {
        "embed_tokens.weight": (vocab_size, hidden),
        "markov_head.markov_w1.weight": (vocab_size, RANK),
        "markov_head.markov_w2.weight": (draft_vocab or vocab_size, RANK),
        "confidence_head.proj.weight": (1, hidden + RANK),
        "confidence_head.proj.bias": (1,),
    }
    if draft_vocab is None:
        shapes["lm_head.weight"] = (vocab_size, hidden)
    if markov == "gated":
        shapes["markov_head.gate_proj.weight"] = (RANK, hidden + RANK)
        shapes["markov_head.gate_proj.bias"] = (RANK,)
    elif markov == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * RANK, 2 * RANK + hidden)
        shapes["markov_head.joint_proj.bias"] = (3 * RANK,)
    return tensors | {
        name: torch.randn(*shape, generator=generator) * 0.5 for name, shape in shapes.items()
    }


PEAGLE: dict[str, Any] = {
    "architectures": ["PEagleSpeculator"],
    "speculators_model_type": "peagle",
    "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
    "mask_token_id": MASK_TOKEN,
    "transformer_layer_config": {**eagle.LLAMA, "num_hidden_layers": 2},
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 6}]},
}


def peagle_tensors(*, hidden: int = eagle.HIDDEN_SIZE, **sizes: Any) -> eagle.Tensors:
    """As `speculators` saves it: EAGLE-3's tensors, and the state of slots."""
    tensors = eagle.eagle3_tensors(
        layer="layers.0.",
        num_layers=2,
        embedding=True,
        hidden_size=hidden,
        target_hidden=hidden,
        **sizes,
    )
    generator = torch.Generator().manual_seed(13)
    return tensors | {"mask_hidden": torch.randn(1, 1, 3 * hidden, generator=generator)}
