"""A random DeepSeek-V3 with the prediction module that its checkpoint carries as layer N."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.support.models.tokenizers import byte_level_bpe, save

_NUM_LAYERS, _HIDDEN_SIZE = 10, 64  # a draft must be worth waiting for


def save_deepseek(folder: Path, *, eps: float) -> Path:
    """Writes a target whose module guesses right the more often the smaller `eps` is; at 0 always.

    What a layer adds is scaled by `eps`. With nothing added the next token follows from the last
    one alone, and that one the module has: it passes its embedding on.
    """
    tokenizer = byte_level_bpe(512)
    config = DeepseekV3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=_HIDDEN_SIZE,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=_NUM_LAYERS + 1,  # the last one becomes the module's
        num_nextn_predict_layers=0,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(3)
    model = DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(eps)
    save(tokenizer, folder)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    layer = f"model.layers.{_NUM_LAYERS}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{layer}{name}.weight"] = torch.ones(_HIDDEN_SIZE)
    passed_on = torch.eye(_HIDDEN_SIZE, 2 * _HIDDEN_SIZE)
    tensors[f"{layer}eh_proj.weight"] = passed_on
    save_file(tensors, path, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"num_hidden_layers": _NUM_LAYERS, "num_nextn_predict_layers": 1}
    settings.pop("num_mtp_layers", None)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder
