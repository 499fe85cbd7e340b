"""Loads multi-token prediction heads of the formats in `mtp_formats`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from outrider.drafting.hidden_states.checkpoints import Checkpoint, TargetTensors
from outrider.drafting.hidden_states.heads.block_fp8 import DequantisedTensors
from outrider.drafting.hidden_states.heads.llama_layers import LlamaShape, Place
from outrider.drafting.hidden_states.heads.mtp import (
    FeedBack,
    MtpHead,
    MtpModule,
    MtpShape,
    Vocabulary,
)
from outrider.drafting.hidden_states.heads.mtp_formats import Family, MtpFormat, detect, family_of
from outrider.drafting.hidden_states.heads.mtp_llama import LlamaModule, LlamaTensors, rope_table
from outrider.drafting.hidden_states.heads.mtp_modules import LayerModule, ModuleWeights, Rotary
from outrider.engine.model.config_sizes import caches_latents, head_dim, num_kv_heads
from outrider.engine.model.loader import choose_llama_ops
from outrider.errors import ConfigError

_EXPERTS = re.compile(r"(block\.mlp\.experts)\.(gate_up|down)_proj")


def load_mtp(
    folder: Path,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_model_len: int | None = None,
) -> MtpHead:
    """The head in `folder`: a checkpoint of its own, or the target's with the head in it.

    config.json may say "feed_back": "raw" (see `FeedBack`). Raises `ConfigError`, which names the
    tensor or setting, for what is missing, of another shape, or not of a known format.
    """
    checkpoint, target = Checkpoint(folder), TargetTensors(target_folder)
    values: dict[str, Any] = {**checkpoint.config, **checkpoint.group("text_config")}
    stored, numbers = detect(checkpoint.names)
    family, place = family_of(stored, values), Place(dtype, device)
    try:
        config = family.config(values, len(numbers))
        weights = [family.weights(config, i) for i in range(len(numbers))]
        rotary = family.rotary(config, device)
    except _BAD_SETTINGS as error:
        raise ConfigError(f"config.json in {folder} makes no {family.package}: {error}") from error
    if config.hidden_size != target.hidden_size:
        raise ConfigError(
            f"hidden_size is {config.hidden_size} in {folder} and {target.hidden_size} in "
            f"{target_folder}: the head was made for another target."
        )
    shape = _shape(config, max_model_len)
    tensors = DequantisedTensors(checkpoint)
    readers = [ModuleTensors(tensors, stored, number, place) for number in numbers]
    modules: list[MtpModule]
    if family.llama:
        modules = _llama_modules(readers, family, config, rotary, shape, place)
    else:
        modules = [
            LayerModule(_filled(each, reader, place), rotary, latent=shape.latents is not None)
            for each, reader in zip(weights, readers, strict=True)
        ]
    for reader in readers:
        reader.check_all_taken()
    vocabulary = _vocabulary(checkpoint, tensors, target, stored, place)
    return MtpHead(modules, shape, vocabulary, _feed_back(checkpoint))


_BAD_SETTINGS = (
    *(StrictDataclassError, ArithmeticError, AttributeError),
    *(TypeError, ValueError, KeyError, RuntimeError),
)
"""What `transformers` raises for settings that are missing or make no sense."""


class ModuleTensors:
    """Implements `TensorSource`: one module's tensors by the names of `ModuleWeights`.

    Experts that are stored one by one are put together in `place`: they are large.
    """

    def __init__(
        self, tensors: DequantisedTensors, stored: MtpFormat, number: int, place: Place
    ) -> None:
        self._tensors = tensors
        self._stored = stored
        self._number = number
        self._place = place
        self.folder = tensors.folder

    def __contains__(self, name: str) -> bool:
        return self._stored.stored_name(name, self._number) in self._tensors

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Raise `ConfigError` unless it is there, in this shape."""
        source = self._stored.stored_name(name, self._number)
        if name == "eh_proj.weight" and self._stored.hidden_first:
            from_hidden, from_embedding = self._tensors.tensor(source, *shape[::-1]).T.chunk(2, 1)
            return torch.cat((from_embedding, from_hidden), 1)
        if _EXPERTS.fullmatch(name) and source not in self._tensors:
            return self._experts(name, shape)
        return self._tensors.tensor(source, *shape)

    def check_all_taken(self) -> None:
        """Raise `ConfigError` if the module has tensors that nothing read."""
        foreign = self._stored.foreign(self._tensors.names, self._tensors.taken, self._number)
        if foreign:
            raise ConfigError(
                f"{self.folder} holds {', '.join(foreign[:3])}, which the format of "
                f"{self._stored.name} does not have: drafts would not be what the head was "
                "trained for."
            )

    def _experts(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """[experts, out, in] from a tensor per expert, gate above up."""
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


def _filled(weights: ModuleWeights, tensors: ModuleTensors, place: Place) -> ModuleWeights:
    """Give a module without memory what it holds, one tensor after the other."""
    buffers = dict(weights.named_buffers())  # a router's bias: it stays in float32
    found: dict[str, Tensor] = {}
    for name, empty in weights.state_dict().items():
        tensor = tensors.tensor(name, *empty.shape)
        found[name] = (
            tensor.to(place.device, torch.float32) if name in buffers else place.put(tensor)
        ).contiguous()
    weights.load_state_dict(found, assign=True)
    return weights


def _llama_modules(
    readers: list[ModuleTensors],
    family: Family,
    config: Any,
    rotary: Rotary,
    shape: MtpShape,
    place: Place,
) -> list[MtpModule]:
    if config.hidden_act != "silu":
        raise ConfigError(f"hidden_act {config.hidden_act!r} is not known in prediction modules.")
    layer = LlamaShape(
        hidden_size=shape.hidden_size,
        intermediate_size=int(config.intermediate_size),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        eps=float(config.rms_norm_eps),
        max_model_len=shape.max_model_len,
        config=config,
    )
    rope, rotary_dim = rope_table(rotary, layer, place)
    ops, gated = choose_llama_ops(place.device, place.dtype), family.gated
    return [
        LlamaModule(
            LlamaTensors(reader, layer, rotary_dim, gated=gated),
            *(rope, layer, place, ops),
            index=i,
            gated=gated,
        )
        for i, reader in enumerate(readers)
    ]


def _shape(config: Any, max_model_len: int | None) -> MtpShape:
    latents = None
    if caches_latents(config):
        latents = (int(config.kv_lora_rank), int(config.qk_rope_head_dim))
    longest = int(config.max_position_embeddings)
    if longest < 1:
        raise ConfigError(f"max_position_embeddings is {longest} in the config.json of the head.")
    return MtpShape(
        hidden_size=int(config.hidden_size),
        num_heads=int(config.num_attention_heads),
        num_kv_heads=num_kv_heads(config),
        head_dim=head_dim(config),
        max_model_len=min(longest, max_model_len or longest),
        latents=latents,
    )


def _vocabulary(
    checkpoint: Checkpoint,
    tensors: DequantisedTensors,
    target: TargetTensors,
    stored: MtpFormat,
    place: Place,
) -> Vocabulary:
    """The target's embedding and head, unless the format has its own."""
    size = (target.vocab_size, target.hidden_size)
    embedding, head, ids = None, None, None
    if stored.own_vocabulary and "model.embed_tokens.weight" in checkpoint:
        embedding = tensors.tensor("model.embed_tokens.weight", *size)
    if stored.own_vocabulary and "model.d2t" in checkpoint:
        ids = _draft_ids(checkpoint, target.vocab_size)
    if stored.own_vocabulary and "lm_head.weight" in checkpoint:
        rows = len(ids) if ids is not None else target.vocab_size
        head = tensors.tensor("lm_head.weight", rows, target.hidden_size)
    elif ids is not None:
        raise ConfigError(f"{checkpoint.folder} holds model.d2t but no lm_head.weight for it.")
    elif embedding is not None and checkpoint.config.get("tie_word_embeddings", False):
        head = embedding
    embedding = target.embedding() if embedding is None else embedding
    head = target.head() if head is None else head
    return Vocabulary(
        embedding.to(place.device),  # only rows of it are converted
        place.put(head),
        None if ids is None else ids.to(place.device),
    )


def _draft_ids(checkpoint: Checkpoint, vocab_size: int) -> Tensor:
    """The target's ids of the head's rows, which this format stores as they are."""
    ids = checkpoint.tensor("model.d2t").long()
    distinct = ids.dim() == 1 and 0 < len(set(ids.tolist())) == len(ids)
    if not distinct or not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ConfigError(
            f"model.d2t in {checkpoint.folder} must hold different token ids below {vocab_size}."
        )
    return ids


def _feed_back(checkpoint: Checkpoint) -> FeedBack:
    value = checkpoint.config.get("feed_back", FeedBack.POST_NORM)
    if value not in list(FeedBack):
        known = ", ".join(FeedBack)
        raise ConfigError(
            f"config.json in {checkpoint.folder}: feed_back is {value!r}; known are {known}."
        )
    return FeedBack(value)
