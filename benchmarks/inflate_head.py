"""Write an EAGLE-3 or DSpark module in a larger shape, for a target that was inflated.

    python -m benchmarks.inflate_head --shape llama-3.1-8b --out FOLDER --device cuda

As in inflate.py, the first product reads only the small channels of the target's states, and the
module's extra channels stay zero, except for the target's constant one: by it the final norm and
the head score extra tokens very low. The output layer is the module's own and knows `DRAFT_VOCAB`
tokens. A module without an output layer begins with the target's. A DSpark module gets at least
`DSPARK_LAYERS` layers.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
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
DSPARK_LAYERS = 5  # of DSpark modules as their authors publish them
_MIDDLE, _MARKOV, _CONFIDENCE = "midlayer.", "markov_head.markov_w", "confidence_head.proj."
_JOINT = "markov_head.joint_proj."
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
        known = (f"{_MIDDLE}hidden_norm.weight", f"{_MARKOV}1.weight")
        if not any(name in checkpoint for name in known) or "embed_tokens.weight" in checkpoint:
            raise ShapeError(
                "Only a module with midlayer.* or markov_head.*, without an embedding, is inflated."
            )
        old = LlamaConfig(**{**checkpoint.config, "model_type": "llama"})
        config = {
            **checkpoint.config,
            **{name: shape[name] for name in _SIZES},
            "rms_norm_eps": old.rms_norm_eps * old.hidden_size / shape["hidden_size"],
            "draft_vocab_size": shape.get("draft_vocab_size", DRAFT_VOCAB),
        }
        if f"{_MARKOV}1.weight" in checkpoint:
            count = max(old.num_hidden_layers, DSPARK_LAYERS)
            config["num_hidden_layers"] = count
            config["layer_types"] = ["full_attention"] * count
        else:
            config["target_hidden_size"] = shape["hidden_size"]
        large = LlamaConfig(**{**config, "model_type": "llama"})
        return cls(_Small(old), large, device, dtype), config

    def module(self, checkpoint: Checkpoint, target: TargetTensors) -> dict[str, Tensor]:
        """Return the large module's tensors, made on the device; `target` is the small one."""
        generator = torch.Generator(self.device).manual_seed(0)
        old, new = self.small.config, self.config
        d, width = old.hidden_size, new.hidden_size

        def stored(name: str) -> Tensor:
            return checkpoint.tensor(f"{name}.weight")

        joint = stored("fc").chunk(stored("fc").shape[1] // d, dim=1)
        fc = self._zeros(width, len(joint) * width)
        for i, part in enumerate(joint):
            fc[:d, i * width : i * width + d] = self._moved(part)
        small_head = stored("lm_head") if "lm_head.weight" in checkpoint else target.head()
        known = len(small_head)
        head = self._zeros(new.draft_vocab_size, width)
        head[:known, :d] = self._moved(small_head)
        head[known:, d] = -PENALTY
        # Differences between target and draft ids; extra tokens are extra ones of the target.
        d2t = torch.full((len(head),), old.vocab_size - known)
        d2t[:known] = checkpoint.stored("d2t") if "d2t" in checkpoint else 0
        norm = self._norm(stored("norm"))
        norm[d] = GAIN
        shared = {"lm_head.weight": head, "d2t": d2t, "norm.weight": norm, "fc.weight": fc}
        if f"{_MARKOV}1.weight" in checkpoint:
            return shared | self._dspark(checkpoint, known, generator)
        fc[d, d] = 1  # the constant channel, of one state
        norm = self._norm(stored(f"{_MIDDLE}hidden_norm"))
        layer = self.layer(lambda name: stored(f"{_MIDDLE}{name}"), generator, inputs=2)
        layer |= {"hidden_norm.weight": norm}
        return shared | {f"{_MIDDLE}{name}": tensor for name, tensor in layer.items()}

    def _dspark(
        self, checkpoint: Checkpoint, known: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Return the tensors that DSpark adds; its output layer begins with `known` tokens."""
        old, new = self.small.config, self.config
        d, width = old.hidden_size, new.hidden_size
        module = {"hidden_norm.weight": self._norm(checkpoint.tensor("hidden_norm.weight"))}
        for i in range(new.num_hidden_layers):
            prefix, small = f"layers.{i}.", i < old.num_hidden_layers
            of_layer = partial(self._of_layer, checkpoint, prefix)
            layer = self.layer(of_layer if small else None, generator)
            for name, factor in (("q", 1.0), ("k", (old.head_dim / new.head_dim) ** 0.5)):
                norm = torch.ones(new.head_dim, dtype=self.dtype, device=self.device)
                if small:
                    norm[self._turning_dims().to(self.device)] = self._moved(
                        of_layer(f"self_attn.{name}_norm"), factor
                    )
                layer[f"self_attn.{name}_norm.weight"] = norm
            module |= {f"{prefix}{name}": tensor for name, tensor in layer.items()}
        before, bias = (checkpoint.tensor(f"{_MARKOV}{i}.weight") for i in (1, 2))
        rank = before.shape[1]
        markov = [self._zeros(n, rank) for n in (new.vocab_size, new.draft_vocab_size)]
        markov[0][: len(before)], markov[1][:known] = self._moved(before), self._moved(bias)
        module |= {f"{_MARKOV}{i}.weight": tensor for i, tensor in enumerate(markov, start=1)}
        if f"{_JOINT}weight" in checkpoint:
            joint = self._moved(checkpoint.tensor(f"{_JOINT}weight"))
            module[f"{_JOINT}weight"] = self._zeros(len(joint), 2 * rank + width)
            module[f"{_JOINT}weight"][:, : joint.shape[1]] = joint
            module[f"{_JOINT}bias"] = self._moved(checkpoint.tensor(f"{_JOINT}bias"))
        if f"{_CONFIDENCE}weight" in checkpoint:
            sure = self._moved(checkpoint.tensor(f"{_CONFIDENCE}weight"))
            proj = self._zeros(1, width + sure.shape[1] - d)
            proj[:, :d], proj[:, width:] = sure[:, :d], sure[:, d:]
            module[f"{_CONFIDENCE}weight"] = proj
            module[f"{_CONFIDENCE}bias"] = self._moved(checkpoint.tensor(f"{_CONFIDENCE}bias"))
        return module

    @staticmethod
    def _of_layer(checkpoint: Checkpoint, prefix: str, name: str) -> Tensor:
        return checkpoint.tensor(f"{prefix}{name}.weight")


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
    p.add_argument("--method", choices=("eagle3", "dspark"), default="eagle3")
    p.add_argument("--target-model", default="embedded", help="what it was trained for")
    p.add_argument("--shape", choices=SHAPES, required=True)
    p.add_argument("--out", type=Path, required=True, help="write the module here")
    p.add_argument("--device", default="cpu")
    args = p.parse_args()
    folder, target = resolve_module(args.model, args.method, args.target_model)
    device = torch.device(args.device)
    inflate(folder, target, args.out, SHAPES[args.shape], device, torch.bfloat16)
    return 0


if __name__ == "__main__":
    sys.exit(main())
