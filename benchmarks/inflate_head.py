"""Write an EAGLE-3 module in a larger shape, for a target that was inflated.

    python -m benchmarks.inflate_head --shape llama-3.1-8b --out FOLDER --device cuda

As in inflate.py, the first product reads only the small channels of the target's states, and the
module's extra channels stay zero, except for the target's constant one: by it the final norm and
the head score extra tokens very low. The output layer is the module's own and knows `DRAFT_VOCAB`
tokens. A module without an output layer begins with the target's.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.inflate import GAIN, PENALTY, SHAPES, Inflation, ShapeError
from benchmarks.lib.program import arguments
from outrider.drafting.hidden_states.checkpoints import Checkpoint, TargetTensors
from outrider.models.modules import resolve_module

DRAFT_VOCAB = 32_000  # of EAGLE-3 modules as their authors publish them
_LAYER = "midlayer."
_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size"),
)


@dataclass(frozen=True)
class _Small:
    """The part of the small model that `Inflation` reads."""

    config: LlamaConfig


class HeadInflation(Inflation):
    """An `Inflation` of a module's checkpoint."""

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, shape: dict[str, Any], device: torch.device, dtype: torch.dtype
    ) -> tuple[HeadInflation, dict[str, Any]]:
        """Return an inflation and the large module's config.json. Raises `ShapeError`."""
        names = set(checkpoint.names)
        if f"{_LAYER}hidden_norm.weight" not in names or "embed_tokens.weight" in names:
            raise ShapeError("Only a module with midlayer.*, without an embedding, is inflated.")
        old = LlamaConfig(**checkpoint.config)
        factor = old.hidden_size / shape["hidden_size"]
        config = {
            **checkpoint.config,
            **{name: shape[name] for name in _SIZES},
            "target_hidden_size": shape["hidden_size"],
            "rms_norm_eps": old.rms_norm_eps * factor,
            "draft_vocab_size": shape.get("draft_vocab_size", DRAFT_VOCAB),
        }
        return cls(_Small(old), LlamaConfig(**config), device, dtype), config

    def module(self, checkpoint: Checkpoint, target: TargetTensors) -> dict[str, Tensor]:
        """Return the large module's tensors, made on the device; `target` is the small one."""
        generator = torch.Generator(self.device).manual_seed(0)
        old, new = self.small.config, self.config
        d, width, dim = old.hidden_size, new.hidden_size, new.head_dim
        turning, straight = self._turning_dims(), torch.arange(old.head_dim)
        q_heads, k_heads = self._query_heads(), torch.arange(old.num_key_value_heads)

        def stored(name: str) -> Tensor:
            return checkpoint.tensor(f"{name}.weight")

        def beside(rows: int, places: Tensor, name: str, scale: float = 1.0) -> Tensor:
            """Return a projection of the token's embedding and the state [rows, 2 * width]."""
            weight = self._random(generator, rows * dim, 2 * width)
            weight[:, :d] = weight[:, width : width + d] = 0
            token, state = self._moved(stored(name), scale).chunk(2, dim=1)
            weight[places, :d], weight[places, width : width + d] = token, state
            return weight

        attention, inner, f = (f"{_LAYER}self_attn.", new.intermediate_size, old.intermediate_size)
        gate, up = (self._random(generator, inner, width) for _ in range(2))
        gate[:f, :d] = self._moved(stored(f"{_LAYER}mlp.gate_proj"))
        up[:f, :d] = self._moved(stored(f"{_LAYER}mlp.up_proj"))
        down, o = self._zeros(width, inner), self._zeros(width, new.num_attention_heads * dim)
        down[:d, :f] = self._moved(stored(f"{_LAYER}mlp.down_proj"))
        o[:d, self._rows(q_heads, straight)] = self._moved(stored(f"{attention}o_proj"))
        parts = stored("fc").chunk(stored("fc").shape[1] // d, dim=1)
        fc = self._zeros(width, len(parts) * width)
        for i, part in enumerate(parts):
            fc[:d, i * width : i * width + d] = self._moved(part)
        fc[d, d] = 1  # the constant channel, of one state
        small_head = stored("lm_head") if "lm_head.weight" in checkpoint else target.head()
        known = len(small_head)
        head = self._zeros(new.draft_vocab_size, width)
        head[:known, :d] = self._moved(small_head)
        head[known:, d] = -PENALTY
        # Differences between target and draft ids; extra tokens are extra ones of the target.
        d2t = torch.full((len(head),), old.vocab_size - known)
        d2t[:known] = checkpoint.stored("d2t") if "d2t" in checkpoint else 0
        scale = (dim / old.head_dim) ** 0.5
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        norm = self._norm(stored("norm"))
        norm[d] = GAIN
        queries, keys = self._rows(q_heads, turning), self._rows(k_heads, turning)
        values, kv_heads = self._rows(k_heads, straight), new.num_key_value_heads
        return {
            f"{attention}q_proj.weight": beside(
                new.num_attention_heads, queries, f"{attention}q_proj", scale
            ),
            f"{attention}k_proj.weight": beside(kv_heads, keys, f"{attention}k_proj"),
            f"{attention}v_proj.weight": beside(kv_heads, values, f"{attention}v_proj"),
            f"{attention}o_proj.weight": o,
            f"{_LAYER}mlp.gate_proj.weight": gate,
            f"{_LAYER}mlp.up_proj.weight": up,
            f"{_LAYER}mlp.down_proj.weight": down,
            "fc.weight": fc,
            "lm_head.weight": head,
            "d2t": d2t,
            "norm.weight": norm,
            **{f"{_LAYER}{n}.weight": self._norm(stored(f"{_LAYER}{n}")) for n in norms},
        }


def inflate(
    folder: Path,
    target: Path,
    out: Path,
    shape: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Write the module in `folder`, whose small target is in `target`, as a large one.

    Raises `ShapeError` and `ConfigError`.
    """
    checkpoint = Checkpoint(folder)
    plan, config = HeadInflation.of(checkpoint, shape, device, dtype)
    out.mkdir(parents=True, exist_ok=True)
    module = plan.module(checkpoint, TargetTensors(target))
    tensors = {name: tensor.cpu() for name, tensor in module.items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))


def main() -> int:
    """Write the folder."""
    p = arguments("benchmarks.inflate_head", __doc__)
    p.add_argument("--model", default="embedded", help="the module: a folder")
    p.add_argument("--target-model", default="embedded", help="what it was trained for")
    p.add_argument("--shape", choices=SHAPES, required=True)
    p.add_argument("--out", type=Path, required=True, help="write the module here")
    p.add_argument("--device", default="cpu")
    args = p.parse_args()
    folder, target = resolve_module(args.model, "eagle3", args.target_model)
    device = torch.device(args.device)
    inflate(folder, target, args.out, SHAPES[args.shape], device, torch.bfloat16)
    return 0


if __name__ == "__main__":
    sys.exit(main())
