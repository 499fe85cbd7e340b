"""Write both models as Hugging Face folders with sharded bf16 safetensors."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from training.config import DRAFT, END_ID, END_OF_TEXT_ID, PAD_ID, TARGET, ModelConfig
from training.weights import published

GENERATION = {
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": [END_OF_TEXT_ID, END_ID],
    "pad_token_id": PAD_ID,
    "do_sample": False,
}


def shards(state: dict[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Split the tensors, in order, into parts of at most `limit` bytes."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if size + tensor.nbytes > limit and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    return parts


def export(checkpoint: Path, config: ModelConfig, folder: Path, limit: int) -> None:
    """One model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    state = published(checkpoint)
    parts = shards(state, limit)
    if len(parts) == 1:
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    else:
        index: dict[str, str] = {}
        for number, part in enumerate(parts, 1):
            name = f"model-{number:05}-of-{len(parts):05}.safetensors"
            save_file(part, folder / name, {"format": "pt"})
            index.update(dict.fromkeys(part, name))
        total = sum(tensor.nbytes for tensor in state.values())
        document = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(document, indent=1))
    write = {"config.json": config.to_transformers(), "generation_config.json": GENERATION}
    for name, content in write.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Export target and draft, each with the tokenizer's files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shard-bytes", type=int, default=31_000_000)
    args = parser.parse_args()
    for name, config in (("target", TARGET), ("draft", DRAFT)):
        folder = args.out / name
        export(args.checkpoints / f"{name}.pt", config, folder, args.shard_bytes)
        for file in args.tokenizer.glob("*token*"):
            if file.parent != folder:
                shutil.copy(file, folder / file.name)
        template = args.tokenizer / "chat_template.jinja"
        if template.exists() and args.tokenizer != folder:
            shutil.copy(template, folder / template.name)


if __name__ == "__main__":
    main()
