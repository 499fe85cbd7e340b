"""Convert a Llama checkpoint in Hugging Face format to GGUF, for llama.cpp.

llama.cpp's own converter knows tokenizers by a list of hashes. Here only token ids matter, so the
vocabulary is written under llama.cpp's GPT-2 byte-level BPE. The module needs `gguf`, `torch` and
`safetensors`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def convert(source: Path, destination: Path) -> None:
    """Write `source`'s weights as bf16 (norms as fp32). Raises `ValueError` for non-Llamas."""
    import gguf  # type: ignore[import-not-found, unused-ignore]
    import torch
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("rope_scaling"):
        raise ValueError(f"{source} is not a plain Llama: llama.cpp is left out.")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config

    out: Any = gguf.GGUFWriter(str(destination), "llama")
    out.add_name(source.name)
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_key_length(head_dim)
    out.add_value_length(head_dim)
    out.add_rope_dimension_count(head_dim)
    out.add_rope_freq_base(float(rope["rope_theta"]))
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_vocab_size(config["vocab_size"])
    out.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_tokenizer(out, gguf, source, config["vocab_size"])

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in sorted(_weights(source, load_file).items()):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # Hugging Face rotates halves, GGUF's Llama rotates neighbours.
            n = heads if "q_proj" in name else kv_heads
            tensor = tensor.view(n, 2, head_dim // 2, -1).transpose(1, 2).reshape(tensor.shape)
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if tensor.dim() == 1:
            out.add_tensor(theirs, tensor.float().numpy())
            continue
        bits = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
        out.add_tensor(theirs, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _weights(source: Path, load_file: Any) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def _add_tokenizer(out: Any, gguf: Any, source: Path, vocab_size: int) -> None:
    spec = json.loads((source / "tokenizer.json").read_text())
    pieces = {i: piece for piece, i in spec["model"]["vocab"].items()}
    special = {token["id"] for token in spec["added_tokens"]}
    pieces |= {token["id"]: token["content"] for token in spec["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]]
    kinds = [
        gguf.TokenType.CONTROL
        if i in special
        else gguf.TokenType.NORMAL
        if i in pieces
        else gguf.TokenType.UNUSED
        for i in range(vocab_size)
    ]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list([pieces.get(i, f"[unused{i}]") for i in range(vocab_size)])
    out.add_token_types(kinds)
    out.add_token_merges(merges)
    out.add_add_bos_token(False)
    out.add_eos_token_id(next(iter(sorted(special)), 0))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
