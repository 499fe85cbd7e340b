"""A small Llama with clear winners: kernels differ by the shape of a batch."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine.model.loader import ModelOptions, build_paged_model
from outrider.engine.model.paged_model import PagedModel
from tests.support.recordable import disturbed

VOCAB_SIZE, PAGE_SIZE = 1000, 16


def clear_llama(device: torch.device, num_pages: int, noise: float = 0.0) -> PagedModel:
    """Attention runs in Triton; `disturbed` by `noise`."""
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
    return build_paged_model(
        disturbed(model, noise).to(device),
        ModelOptions(
            page_size=PAGE_SIZE, num_pages=num_pages, attention_backend="triton", self_test=False
        ),
    )
