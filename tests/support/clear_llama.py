"""A small Llama with clear winners: kernels differ by the shape of a batch."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine.loader import build_paged_model
from outrider.engine.paged_model import PagedModel

VOCAB_SIZE, PAGE_SIZE = 1000, 16


def clear_llama(device: torch.device, num_pages: int, noise: float = 0.0) -> PagedModel:
    """Attention runs in Triton; `noise`: of its weights, in parts of their mean size."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.normal_(0.0, 0.12)
    for weight in model.parameters() if noise else ():
        weight.data += noise * weight.data.abs().mean() * torch.randn_like(weight)
    return build_paged_model(
        model.to(device),
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        attention_backend="triton",
        self_test=False,
    )
