"""Write the target as a Hugging Face folder with sharded safetensors.

Matrices are rounded to four mantissa bits within bf16, which halves the size of the compressed
files in git and in images. Drafts learn from the rounded weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from outrider.train.files import rounded, share
from training.config import END_ID, END_OF_TEXT_ID, PAD_ID, ModelConfig

MANTISSA_BITS = 4
GENERATION = {
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": [END_OF_TEXT_ID, END_ID],
    "pad_token_id": PAD_ID,
    "do_sample": False,
}


def main() -> None:
    """Export a checkpoint of `train_target`, beside the tokenizer's files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the tokenizer's folder")
    parser.add_argument("--shard-size", default="31MB")
    args = parser.parse_args()
    saved = torch.load(args.checkpoint, map_location="cpu")
    state = {name: rounded(weight, MANTISSA_BITS) for name, weight in saved["model"].items()}
    save_torch_state_dict(state, args.out, max_shard_size=args.shard_size)
    config = ModelConfig(**saved["config"]).to_transformers()
    for name, content in (("config.json", config), ("generation_config.json", GENERATION)):
        (args.out / name).write_text(json.dumps(content, indent=2) + "\n")
    share(args.out)


if __name__ == "__main__":
    main()
