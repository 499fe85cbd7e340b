"""Draft modules for the targets of `tiny_pair`, with no training."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.checkpoints import block_checkpoints as blocks
from tests.support.checkpoints import eagle_checkpoints as made


def save_eagle(folder: Path, draft: Path) -> Path:
    """An EAGLE module that says what the pair's draft model says, where all are greedy.

    It passes over the target's state, and is the draft's layer: that has a norm before attention
    and EAGLE's has none, which makes no difference to a `unit_embedding`; and no norm before the
    head, which changes no maximum.
    """
    config = json.loads((draft / "config.json").read_text())
    size = config["hidden_size"]
    tensors: dict[str, Tensor] = {
        "fc.weight": torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
    }
    for name, tensor in load_file(draft / "model.safetensors").items():
        if name.startswith("model.layers.0.") and "input_layernorm" not in name:
            tensors[name.removeprefix("model.")] = tensor
    return made.save_head(folder, tensors, config)


def save_eagle3(folder: Path, target: Path) -> Path:
    """An EAGLE-3 module of random weights: it is hardly ever right."""
    config = json.loads((target / "config.json").read_text())
    tensors = made.eagle3_tensors(
        hidden_size=config["hidden_size"],
        target_hidden=config["hidden_size"],
        vocab_size=config["vocab_size"],
        draft_vocab=100,
    )
    llama = {**made.LLAMA, "hidden_size": config["hidden_size"], "max_position_embeddings": 512}
    return made.save_head(folder, tensors, llama)


def save_dflash(folder: Path, target: Path) -> Path:
    """A DFlash module of random weights: it is hardly ever right."""
    config = json.loads((target / "config.json").read_text())
    size, count = config["hidden_size"], config["num_hidden_layers"]
    tensors = blocks.dflash_tensors(hidden=size, vocab_size=config["vocab_size"], draft_vocab=100)
    group = {"target_layer_ids": [0, count // 2, count - 1], "mask_token_id": 7}
    settings = {"hidden_size": size, "max_position_embeddings": 512, "dflash_config": group}
    return made.save_head(folder, tensors, {**blocks.DFLASH, **settings})
