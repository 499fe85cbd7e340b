"""Loads multi-token prediction heads of the formats in `mtp_formats`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from outrider.drafting.hidden_states.checkpoints import Checkpoint, TargetTensors
from outrider.drafting.hidden_states.heads.base import HeadSetup, HeadShape, Place
from outrider.drafting.hidden_states.heads.llama import rope_table
from outrider.drafting.hidden_states.heads.mtp import (
    LayerModule,
    LlamaModule,
    ModuleWeights,
    MtpHead,
)
from outrider.drafting.hidden_states.heads.mtp_formats import MtpFormat, detect, family_of
from outrider.engine.model.config_sizes import caches_latents, head_dim, num_kv_heads
from outrider.errors import ConfigError
from outrider.models.modules import EMBEDDINGS, HEADS

_EXPERTS = re.compile(r"(block\.mlp\.experts)\.(gate_up|down)_proj")
_BAD_SETTINGS = (
    *(StrictDataclassError, ArithmeticError, AttributeError),
    *(TypeError, ValueError, KeyError, RuntimeError),
)
"""Errors that `transformers` raises for settings that are missing or make no sense."""


def read_mtp(folder: Path, setup: HeadSetup) -> MtpHead:
    """Read a checkpoint of the head's own, or the target's with the head in it.

    config.json may say "feed_back": "raw" (see `MtpHead`). Raises `ConfigError`.
    """
    checkpoint, target, place = Checkpoint(folder), setup.target, setup.place
    values: dict[str, Any] = {**checkpoint.config, **checkpoint.group("text_config")}
    feed_back = checkpoint.config.get("feed_back", "post_norm")
    if feed_back not in ("post_norm", "raw"):
        raise ConfigError(
            f"config.json in {folder}: feed_back is {feed_back!r}; known are post_norm, raw."
        )
    stored, numbers = detect(checkpoint.names)
    wanted = values.get("num_nextn_predict_layers", values.get("mtp_num_hidden_layers"))
    if isinstance(wanted, int) and wanted > len(numbers):
        raise ConfigError(
            f"{folder} holds {len(numbers)} of the {wanted} prediction modules that its "
            "config.json counts: download the others."
        )
    family = family_of(stored, values)
    try:
        config = family.config(values, len(numbers))
        weights = [family.weights(config, i) for i in range(len(numbers))]
        rotary = family.rotary(config, place.device)
    except _BAD_SETTINGS as error:
        raise ConfigError(f"config.json in {folder} makes no {family.package}: {error}") from error
    if config.hidden_size != target.hidden_size:
        raise ConfigError(
            f"hidden_size is {config.hidden_size} in {folder} and {target.hidden_size} in "
            f"{target.folder}: the head was made for another target."
        )
    shape = _shape(config, setup)
    readers = [ModuleTensors(checkpoint, stored, number, place) for number in numbers]
    modules: list[LlamaModule] | list[LayerModule]
    if family.llama:
        if config.hidden_act != "silu":
            raise ConfigError(f"hidden_act {config.hidden_act!r} is not known in MTP modules.")
        rope, rotary_dim = rope_table(rotary, shape, place)
        sources = [
            LlamaTensors(reader, shape.head_dim, rotary_dim, gated=family.gated)
            for reader in readers
        ]
        modules = [LlamaModule(source, rope, shape, place, i) for i, source in enumerate(sources)]
    else:
        modules = [
            LayerModule(_filled(empty, reader, place), rotary, latent=shape.latents is not None)
            for empty, reader in zip(weights, readers, strict=True)
        ]
    embedding, head, ids = _vocabulary(checkpoint, target, stored)
    _check_all_taken(checkpoint, stored, numbers)
    raw = feed_back == "raw"
    return MtpHead(modules, shape, place, embedding, head, draft_ids=ids, feed_back_raw=raw)


class ModuleTensors:
    """A `TensorSource` of one module's tensors, by the names of `ModuleWeights`.

    Experts that are stored one by one are put together in `place`, since they are large.
    """

    def __init__(
        self, checkpoint: Checkpoint, stored: MtpFormat, number: int, place: Place
    ) -> None:
        self._checkpoint = checkpoint
        self._stored = stored
        self._number = number
        self._place = place
        self.folder = checkpoint.folder

    def __contains__(self, name: str) -> bool:
        return self._stored.stored_name(name, self._number) in self._checkpoint

    def tensor(self, name: str, *shape: int) -> Tensor:
        source = self._stored.stored_name(name, self._number)
        if name == "eh_proj.weight" and self._stored.hidden_first:
            joined = self._checkpoint.tensor(source, *shape[::-1]).T
            from_hidden, from_embedding = joined.chunk(2, 1)
            return torch.cat((from_embedding, from_hidden), 1)
        if _EXPERTS.fullmatch(name) and source not in self._checkpoint:
            return self._experts(name, shape)
        return self._checkpoint.tensor(source, *shape)

    def _experts(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return [experts, out, in] from a tensor per expert, gate above up."""
        root, kind = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        experts, rows, width = shape
        rows //= len(parts)
        stacked = torch.empty(shape, dtype=self._place.dtype, device=self._place.device)
        for expert in range(experts):
            for i, part in enumerate(parts):
                weight = self.tensor(f"{root}.{expert}.{part}.weight", rows, width)
                stacked[expert, i * rows : (i + 1) * rows] = weight
        return stacked


class LlamaTensors:
    """A `TensorSource` of a module's tensors as Llama has them.

    With `gated`, Qwen3.5's conventions hold: norms multiply by 1 + w, and q_proj holds queries and
    gates, of which the gates are read as `gate.weight`. Where only the first `rotary_dim` numbers
    of a head are rotated by its position, the numbers are put in another order, in which the pairs
    that are rotated stand as in a head that is rotated whole. The order is the same in queries and
    keys, so their products stay the same.
    """

    def __init__(
        self, source: ModuleTensors, head_dim: int, rotary_dim: int, *, gated: bool
    ) -> None:
        self._source = source
        self._head_dim = head_dim
        self._gated = gated
        half, dim = rotary_dim // 2, torch.arange(head_dim)
        rest = dim[rotary_dim:]
        first, second = rest.chunk(2) if len(rest) else (rest, rest)
        self._order = torch.cat((dim[:half], first, dim[half:rotary_dim], second))
        self.folder: Path = source.folder

    def __contains__(self, name: str) -> bool:
        return self._gated if name == "gate.weight" else name in self._source

    def tensor(self, name: str, *shape: int) -> Tensor:
        kind = name.removeprefix("block.").removeprefix("self_attn.")
        if kind in ("q_proj.weight", "gate.weight") and self._gated:
            rows, width = shape
            both = self._source.tensor("block.self_attn.q_proj.weight", 2 * rows, width)
            queries, gates = both.view(-1, 2, self._head_dim, width).unbind(1)
            found = gates if kind == "gate.weight" else queries.index_select(1, self._order)
            return found.reshape(shape)
        found = self._source.tensor(name, *shape)
        if self._gated and found.dim() == 1 and not kind.endswith("bias"):
            found = 1 + found.float()
        if kind.startswith(("q_proj", "k_proj", "q_norm", "k_norm")):
            heads = found.view(-1, self._head_dim, *shape[1:])
            return heads.index_select(1, self._order).reshape(shape)
        return found


def _check_all_taken(checkpoint: Checkpoint, stored: MtpFormat, numbers: list[int]) -> None:
    """Raise `ConfigError` if tensors were not read that belong to the modules."""
    roots = [stored.root.format(i=number) for number in numbers]
    copies = {root + name for root in roots for name in stored.copies}
    if stored.root.startswith("model.layers.") and numbers[0] == 0:  # no target is stored beside
        # The target's are used in place of these; model.d2t names the tokens of model.t2d.
        checkpoint.check_all_taken({*copies, *EMBEDDINGS, *HEADS, "model.t2d"})
    else:
        for root in roots:
            checkpoint.check_all_taken(copies, root)


def _filled(weights: ModuleWeights, tensors: ModuleTensors, place: Place) -> ModuleWeights:
    """Give a module without memory its weights, one tensor after the other."""
    buffers = dict(weights.named_buffers())  # a router's bias: it stays in float32
    found: dict[str, Tensor] = {}
    for name, empty in weights.state_dict().items():
        tensor = tensors.tensor(name, *empty.shape)
        found[name] = (
            tensor.to(place.device, torch.float32) if name in buffers else place.put(tensor)
        ).contiguous()
    weights.load_state_dict(found, assign=True)
    return weights


def _shape(config: Any, setup: HeadSetup) -> HeadShape:
    longest = int(config.max_position_embeddings)
    if longest < 1:
        raise ConfigError(f"max_position_embeddings is {longest} in the config.json of the head.")
    latents = None
    if caches_latents(config):
        latents = (int(config.kv_lora_rank), int(config.qk_rope_head_dim))
    return HeadShape(
        hidden_size=int(config.hidden_size),
        num_heads=int(config.num_attention_heads),
        num_kv_heads=num_kv_heads(config),
        head_dim=head_dim(config),
        max_model_len=setup.num_positions(longest),
        intermediate_size=int(getattr(config, "intermediate_size", 0)),
        eps=float(config.rms_norm_eps),
        latents=latents,
    )


def _vocabulary(
    checkpoint: Checkpoint, target: TargetTensors, stored: MtpFormat
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return embedding, head and draft ids: the target's, unless the format has its own."""
    size = (target.vocab_size, target.hidden_size)
    embedding, head, ids = None, None, None
    own = checkpoint.names if stored.own_vocabulary else frozenset()
    if "model.embed_tokens.weight" in own:
        embedding = checkpoint.tensor("model.embed_tokens.weight", *size)
    if "model.d2t" in own:
        ids = checkpoint.token_ids("model.d2t", target.vocab_size)
    if "lm_head.weight" in own:
        rows = len(ids) if ids is not None else target.vocab_size
        head = checkpoint.tensor("lm_head.weight", rows, target.hidden_size)
    elif ids is not None:
        raise ConfigError(f"{checkpoint.folder} holds model.d2t but no lm_head.weight for it.")
    elif embedding is not None and checkpoint.config.get("tie_word_embeddings", False):
        head = embedding
    embedding = target.embedding() if embedding is None else embedding
    return embedding, target.head() if head is None else head, ids
