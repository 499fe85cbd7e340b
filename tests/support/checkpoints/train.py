"""A tiny target on disk, and text for it, to train draft methods on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.models.tokenizers import byte_level_bpe, save

HIDDEN_SIZE = 32


def save_target(folder: Path) -> Path:
    """A random Llama of 7 layers that says different things at different places."""
    tokenizer = byte_level_bpe()
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, 0.15)
        model.lm_head.weight.mul_(6.0)  # it is sure of what it says
    save(tokenizer, folder)
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 1}))
    return folder


OTHERS: dict[str, dict[str, int]] = {
    "GPT2": {"n_embd": HIDDEN_SIZE, "n_layer": 7, "n_head": 4, "n_positions": 128},
    "OPT": {
        "hidden_size": HIDDEN_SIZE,
        "word_embed_proj_dim": HIDDEN_SIZE,
        "ffn_dim": 64,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
    "GPTNeoX": {
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
    "Bloom": {"hidden_size": HIDDEN_SIZE, "n_layer": 7, "n_head": 4},
}
"""Architectures whose configs have other names than Llama's."""


def save_other_target(folder: Path, kind: str, **changes: int) -> Path:
    """A random model of `OTHERS`."""
    tokenizer = byte_level_bpe()
    settings = {"vocab_size": tokenizer.get_vocab_size(), "bos_token_id": 0, "eos_token_id": 1}
    config = getattr(transformers, f"{kind}Config")(**{**settings, **OTHERS[kind], **changes})
    save(tokenizer, folder)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def save_text(path: Path, num_tokens: int = 4000) -> Path:
    """A stream of tokens in which few follow each: `.npy`."""
    generator = np.random.default_rng(0)
    tokens = np.cumsum(generator.integers(1, 3, num_tokens)) % 200 + 2
    np.save(path, tokens.astype(np.int32))
    return path


def process_environment(rank: int, port: int) -> dict[str, str]:
    """What torchrun sets, for two processes."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **address, "WORLD_SIZE": "2", "RANK": str(rank)}
