"""A random Llama pair that agrees as often as a test wants, with no training.

The target is the draft's layers plus more layers whose output projections are scaled by `eps`:
at 0 both say the same, and the larger it is the more often they differ.
Further layers of the target only take time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.models.tokenizers import byte_level_bpe, save

_VOCAB_SIZE = 512
_DRAFT_LAYERS, _DIFFERING_LAYERS = 1, 2
_IDLE_LAYERS = 12  # take time and change nothing: a draft must be worth waiting for
_TARGET_LAYERS = _DRAFT_LAYERS + _DIFFERING_LAYERS + _IDLE_LAYERS


def save_pair(
    folder: Path, *, eps: float, unit_embedding: bool = False, special: Sequence[str] = ()
) -> tuple[Path, Path]:
    """Writes `folder`/target and `folder`/draft with one tokenizer; returns both.

    The tokenizer has `special` tokens besides its own.

    With `unit_embedding` every token's embedding has a root mean square of 1: norming it changes
    nothing (see `tiny_heads`).
    """
    tokenizer = byte_level_bpe(_VOCAB_SIZE)
    tokenizer.add_special_tokens(list(special))
    torch.manual_seed(7)
    target = _model(tokenizer.get_vocab_size(), _TARGET_LAYERS)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() == 2:
                # Wide enough for clear winners and varied text; the default is nearly uniform.
                parameter.normal_(0.0, 0.12)
        if unit_embedding:
            rows = target.model.embed_tokens.weight
            rows.div_(rows.square().mean(dim=-1, keepdim=True).sqrt())
        for i, layer in enumerate(target.model.layers[_DRAFT_LAYERS:]):
            scale = eps if i < _DIFFERING_LAYERS else 0.0
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.down_proj.weight.mul_(scale)
    draft = _model(tokenizer.get_vocab_size(), _DRAFT_LAYERS)
    draft.load_state_dict(target.state_dict(), strict=False)
    for name, model in (("target", target), ("draft", draft)):
        save(tokenizer, folder / name)
        model.save_pretrained(folder / name)
        path = folder / name / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 1}))
    return folder / "target", folder / "draft"


def _model(vocab_size: int, num_layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()
