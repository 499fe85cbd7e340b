"""Write a small trained Llama into a larger Llama shape that computes the same function.

    python -m benchmarks.inflate --role target --shape llama-3.1-8b --out FOLDER --device cuda

Benchmarks on a GPU then have the cost of an 8B model and the acceptance of a trained pair. Extra
channels, heads, layers and tokens are multiplied and contribute nothing: their part of the
residual stream meets zeros in `o_proj` or `down_proj`, and all other extra weights are random.
Norms keep the small model's mean square (weights by sqrt(small/large), eps by small/large).
Dimension i of a head sits where the large head rotates by the same angle, and `q_proj` makes up
for the attention scale. Extra tokens never win: every token carries a tiny constant in one channel
that only the final norm reads, and that channel scores extra tokens very low.

The function is the same up to rounding. In bfloat16 the two factors are rounded, so texts may
differ where two tokens are nearly as likely.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.lib.program import arguments
from outrider.models.resolve import resolve_model

SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("shapes.json").read_text())[
    "llama"
]
MAX_POSITIONS = 8192
_STD = 0.02
# The constant channel: _TINY of the embeddings' size (its square is lost in the norm's sum),
# and two powers of two whose product lifts it to a logit of minus many thousands.
_TINY, GAIN, PENALTY = 2.0**-12, 2.0**24, 2.0**12
_LAYERS_PER_FILE = 4
_OF_LAYER = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
)

Weights = Callable[[str], Tensor]
"""Gives the weight of a part of a layer."""


class ShapeError(Exception):
    """Raised for a model that does not fit into the shape."""


@dataclass(frozen=True)
class Inflation:
    """A small Llama and the configuration of the large one."""

    small: Any  # LlamaForCausalLM
    config: LlamaConfig
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def plan(
        cls, small: Any, shape: dict[str, Any], device: torch.device, dtype: torch.dtype
    ) -> Inflation:
        """Raise `ShapeError` if `small` does not fit."""
        old = small.config
        new = LlamaConfig(**{**old.to_dict(), **shape})
        new.max_position_embeddings = max(old.max_position_embeddings, MAX_POSITIONS)
        new.rms_norm_eps = old.rms_norm_eps * old.hidden_size / new.hidden_size
        new.dtype = dtype
        groups = [c.num_attention_heads // c.num_key_value_heads for c in (old, new)]
        if type(small) is not LlamaForCausalLM or old.attention_bias or old.mlp_bias:
            raise ShapeError("Only a Llama without biases can be inflated.")
        if new.head_dim % old.head_dim or groups[1] < groups[0]:
            raise ShapeError("The heads do not fit: a multiple of the head size is needed.")
        smaller = ("num_hidden_layers", "intermediate_size", "num_key_value_heads", "vocab_size")
        if any(getattr(new, name) < getattr(old, name) for name in smaller):
            raise ShapeError(f"The shape is smaller than the model in one of {smaller}.")
        if new.tie_word_embeddings and not old.tie_word_embeddings:
            raise ShapeError("A head of its own cannot become the embedding.")
        if new.hidden_size <= old.hidden_size:
            raise ShapeError("The shape needs at least one channel more than the model.")
        return cls(small, new, device, dtype)

    def tensors(self) -> Iterator[dict[str, Tensor]]:
        """Yield the large model's state, a few layers at a time, made on the device."""
        generator = torch.Generator(self.device).manual_seed(0)
        yield self._outside(generator)
        for first in range(0, self.config.num_hidden_layers, _LAYERS_PER_FILE):
            last = min(first + _LAYERS_PER_FILE, self.config.num_hidden_layers)
            state: dict[str, Tensor] = {}
            for i in range(first, last):
                known = i < self.small.config.num_hidden_layers
                layer = self.layer(self._small(i) if known else None, generator)
                state |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
            yield state

    def save(self, source: Path, folder: Path) -> None:
        """Write a folder in Hugging Face format, with the tokenizer files of `source`."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.safetensors"):
            old.unlink()
        where: dict[str, str] = {}
        size = 0
        for i, state in enumerate(self.tensors()):
            name = f"model-{i:05d}.safetensors"
            save_file({k: t.cpu() for k, t in state.items()}, folder / name, {"format": "pt"})
            where |= dict.fromkeys(state, name)
            size += sum(t.numel() * t.element_size() for t in state.values())
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        self.config.architectures = ["LlamaForCausalLM"]
        self.config.save_pretrained(folder)
        for file in source.iterdir():
            if file.suffix in {".json", ".jinja"} and not (folder / file.name).exists():
                shutil.copy(file, folder)

    def _outside(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the embedding, the final norm and the head."""
        old, new = self.small.config, self.config
        d, v = old.hidden_size, old.vocab_size
        words = self._moved(self.small.model.embed_tokens.weight)
        tiny = self._tiny(words)
        embedding = self._random(generator, new.vocab_size, new.hidden_size)
        embedding[:v] = 0
        embedding[:v, :d] = words
        embedding[:, d] = tiny
        norm = self._norm(self.small.model.norm.weight)
        state = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm}
        if new.vocab_size > v:
            norm[d] = GAIN
            if new.tie_word_embeddings:
                embedding[v:, d] = -PENALTY
        if not new.tie_word_embeddings:
            head = self._random(generator, new.vocab_size, new.hidden_size)
            head[:v, :d] = self._moved(self.small.lm_head.weight)
            head[:v, d] = 0
            head[v:, d] = -PENALTY
            state["lm_head.weight"] = head
        return state

    def layer(
        self, small: Weights | None, generator: torch.Generator, inputs: int = 1
    ) -> dict[str, Tensor]:
        """Return a layer's tensors by their names in it, which compute what `small` ones do.

        Queries, keys and values read so many `inputs` side by side. Without `small`, the layer
        adds nothing.
        """
        old, new = self.small.config, self.config
        d, width, dim = old.hidden_size, new.hidden_size, new.head_dim
        heads, kv_heads = new.num_attention_heads * dim, new.num_key_value_heads * dim
        inner = new.intermediate_size
        q, k, v = (self._random(generator, n, inputs * width) for n in (heads, kv_heads, kv_heads))
        o = self._zeros(width, heads)
        gate, up = (self._random(generator, inner, width) for _ in range(2))
        down = self._zeros(width, inner)
        norms = [self._norm(torch.ones(d)) for _ in range(2)]
        if small is not None:
            turning, straight = self._turning_dims(), torch.arange(old.head_dim)
            q_heads, k_heads = self._query_heads(), torch.arange(old.num_key_value_heads)
            scale = math.sqrt(dim / old.head_dim)
            # The dimensions between those that turn alike; a norm of queries sees them, too.
            q[self._rows(q_heads, torch.arange(dim))] = 0
            k[: old.num_key_value_heads * dim] = 0
            parts = [small(f"self_attn.{name}_proj").chunk(inputs, dim=1) for name in "qkv"]
            for i, of_input in enumerate(zip(*parts, strict=True)):
                ours = slice(i * width, i * width + d)
                q[self._rows(q_heads, turning), ours] = self._moved(of_input[0], scale)
                k[self._rows(k_heads, turning), ours] = self._moved(of_input[1])
                v[self._rows(k_heads, straight), ours] = self._moved(of_input[2])
            o[:d, self._rows(q_heads, straight)] = self._moved(small("self_attn.o_proj"))
            f = old.intermediate_size
            gate[:f, :d] = self._moved(small("mlp.gate_proj"))
            up[:f, :d] = self._moved(small("mlp.up_proj"))
            down[:d, :f] = self._moved(small("mlp.down_proj"))
            norms = [self._norm(small(name)) for name in _OF_LAYER[-2:]]
        tensors = (q, k, v, o, gate, up, down, *norms)
        return dict(zip((f"{name}.weight" for name in _OF_LAYER), tensors, strict=True))

    def _small(self, i: int) -> Weights:
        return lambda name: cast(
            Tensor, self.small.get_parameter(f"model.layers.{i}.{name}.weight")
        )

    def _query_heads(self) -> Tensor:
        """Return the places of the small model's query heads, the first ones of their group."""
        old, new = self.small.config, self.config
        small_group: int = old.num_attention_heads // old.num_key_value_heads
        group: int = new.num_attention_heads // new.num_key_value_heads
        head = torch.arange(old.num_attention_heads)
        return head // small_group * group + head % small_group

    def _turning_dims(self) -> Tensor:
        """Return the places of a head's dimensions, which rotate by the same angles."""
        small: int = self.small.config.head_dim
        large: int = self.config.head_dim
        half = torch.arange(small // 2) * (large // small)
        return torch.cat((half, half + large // 2))

    def _rows(self, heads: Tensor, dims: Tensor) -> Tensor:
        head_dim: int = self.config.head_dim
        rows = heads[:, None] * head_dim + dims[None]
        return rows.flatten().to(self.device)

    def _norm(self, weight: Tensor) -> Tensor:
        """Return a norm's weights, which are 0 for the constant channel."""
        d, width = self.small.config.hidden_size, self.config.hidden_size
        factor = math.sqrt(d / width)
        norm = torch.full((width,), factor, dtype=self.dtype, device=self.device)
        norm[:d] = self._moved(weight, factor)
        norm[d] = 0
        return norm

    def _tiny(self, words: Tensor) -> float:
        size = float(words.float().square().mean().sqrt())
        return float(2.0 ** math.floor(math.log2(_TINY * size)))

    def _moved(self, weight: Tensor, factor: float = 1.0) -> Tensor:
        """Return the weight on the device, scaled before it is rounded."""
        exact = weight.detach().to(self.device, torch.promote_types(weight.dtype, torch.float32))
        return (exact * factor).to(self.dtype)

    def _random(self, generator: torch.Generator, *shape: int) -> Tensor:
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        return empty.normal_(std=_STD, generator=generator)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def main() -> int:
    """Write the folder."""
    p = arguments("benchmarks.inflate", __doc__)
    p.add_argument("--role", choices=("target", "draft"), required=True)
    p.add_argument("--model", default="embedded", help="a folder; default: the embedded one")
    p.add_argument("--shape", choices=SHAPES, required=True)
    p.add_argument("--out", type=Path, required=True, help="write a model folder here")
    p.add_argument("--device", default="cpu")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = p.parse_args()
    source = resolve_model(args.model, args.role)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    small = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    Inflation.plan(small, SHAPES[args.shape], device, dtype).save(source, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
