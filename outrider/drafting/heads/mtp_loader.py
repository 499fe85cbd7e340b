"""Loads multi-token prediction heads of the formats in `mtp_formats`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.drafting.checkpoints import Checkpoint, TargetTensors
from outrider.drafting.heads.block_fp8 import DequantisedTensors
from outrider.drafting.heads.mtp import FeedBack, MtpHead, MtpModule, Vocabulary
from outrider.drafting.heads.mtp_formats import MtpFormat, detect, family_of
from outrider.errors import ConfigError

_EXPERTS = re.compile(r"(block\.mlp\.experts)\.(gate_up|down)_proj")


def load_mtp(
    folder: Path, target_folder: Path, dtype: torch.dtype, device: torch.device
) -> MtpHead:
    """The head in `folder`: a checkpoint of its own, or the target's with the head in it.

    config.json may say "feed_back": "raw" (see `FeedBack`). Raises `ConfigError`, which names the
    tensor or setting, for what is missing, of another shape, or not of a known format.
    """
    checkpoint, target = Checkpoint(folder), TargetTensors(target_folder)
    config: dict[str, Any] = {**checkpoint.config, **checkpoint.config.get("text_config", {})}
    stored, numbers = detect(checkpoint.names)
    made, modules, rotary = family_of(stored, config).build(config, len(numbers))
    hidden_size = int(made.hidden_size)
    if hidden_size != target.hidden_size:
        raise ConfigError(
            f"hidden_size is {hidden_size} in {folder} and {target.hidden_size} in {target_folder}:"
            " the head was made for another target."
        )
    reader = _ModuleReader(DequantisedTensors(checkpoint), stored, dtype, device)
    for module, number in zip(modules, numbers, strict=True):
        reader.fill(module, number)
    return MtpHead(
        modules,
        rotary.to(device),
        made,
        _vocabulary(checkpoint, target, stored, dtype, device),
        _feed_back(checkpoint),
    )


class _ModuleReader:
    """Fills modules from a checkpoint, one tensor after the other."""

    def __init__(
        self,
        tensors: DequantisedTensors,
        stored: MtpFormat,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._tensors = tensors
        self._stored = stored
        self._dtype = dtype
        self._device = device

    def fill(self, module: MtpModule, number: int) -> None:
        """Gives a module without memory its weights."""
        weights: dict[str, Tensor] = {}
        buffers = dict(module.named_buffers())  # a router's bias: it stays in float32
        for name, empty in module.state_dict().items():
            dtype = torch.float32 if name in buffers else self._dtype
            weights[name] = self._read(name, number, empty.shape, dtype)
        foreign = self._stored.foreign(self._tensors.names, self._tensors.taken, number)
        if foreign:
            raise ConfigError(
                f"{self._tensors.folder} holds {', '.join(foreign[:3])}, which the format of "
                f"{self._stored.name} does not have: drafts would not be what the head was "
                "trained for."
            )
        module.load_state_dict(weights, assign=True)

    def _read(self, name: str, number: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        source = self._stored.stored_name(name, number)
        if _EXPERTS.fullmatch(name) and source not in self._tensors:
            return self._experts(name, number, shape, dtype)
        if name == "eh_proj.weight" and self._stored.hidden_first:
            from_hidden, from_embedding = self._tensors.tensor(source, *shape[::-1]).T.chunk(2, 1)
            return self._place(torch.cat((from_embedding, from_hidden), 1), dtype)
        return self._place(self._tensors.tensor(source, *shape), dtype)

    def _experts(self, name: str, number: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """[experts, out, in] from a tensor per expert, gate above up."""
        root, kind = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        stacked = torch.empty(shape, dtype=dtype, device=self._device)
        rows = shape[1] // len(parts)
        for expert in range(shape[0]):
            for i, part in enumerate(parts):
                source = self._stored.stored_name(f"{root}.{expert}.{part}.weight", number)
                weight = self._tensors.tensor(source, rows, shape[2])
                stacked[expert, i * rows : (i + 1) * rows] = weight
        return stacked

    def _place(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(self._device, dtype).contiguous()


def _vocabulary(
    checkpoint: Checkpoint,
    target: TargetTensors,
    stored: MtpFormat,
    dtype: torch.dtype,
    device: torch.device,
) -> Vocabulary:
    """The target's embedding and head, unless the format has its own."""
    size = (target.vocab_size, target.hidden_size)
    embedding, head, ids = None, None, None
    if stored.own_vocabulary and "model.embed_tokens.weight" in checkpoint:
        embedding = checkpoint.tensor("model.embed_tokens.weight", *size)
    if stored.own_vocabulary and "model.d2t" in checkpoint:
        ids = _draft_ids(checkpoint, target.vocab_size)
    if stored.own_vocabulary and "lm_head.weight" in checkpoint:
        rows = len(ids) if ids is not None else target.vocab_size
        head = checkpoint.tensor("lm_head.weight", rows, target.hidden_size)
    elif ids is not None:
        raise ConfigError(f"{checkpoint.folder} holds model.d2t but no lm_head.weight for it.")
    elif embedding is not None and checkpoint.config.get("tie_word_embeddings", False):
        head = embedding
    embedding = target.embedding() if embedding is None else embedding
    head = target.head() if head is None else head
    return Vocabulary(
        embedding.to(device, dtype),
        head.to(device, dtype),
        None if ids is None else ids.to(device),
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
