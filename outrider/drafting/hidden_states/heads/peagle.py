"""P-EAGLE (`speculators`): an EAGLE-3 module that guesses several tokens in one forward.

The rows past the true ones take a mask token in place of the token before, and a state that was
learnt in place of the target's. All of it is causal, so true rows and slots are fed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafting.drafters import DraftInput, features_on
from outrider.drafting.graphs.batches import LoopBatches
from outrider.drafting.hidden_states.checkpoints import Checkpoint
from outrider.drafting.hidden_states.heads.base import HeadSetup
from outrider.drafting.hidden_states.heads.block import BlockHead
from outrider.drafting.hidden_states.heads.eagle3 import Eagle3Head
from outrider.drafting.hidden_states.heads.eagle3_format import Eagle3Format
from outrider.engine.attention.base import AttentionBackend
from outrider.engine.batch import RowSlice, pack
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.attention_backends import AttentionTraits
from outrider.errors import ConfigError

_DEFAULT_DEPTH = 8


def read_peagle(folder: Path, setup: HeadSetup) -> PEagleHead:
    """Read a checkpoint of `speculators`. Raises `ConfigError`."""
    found, place = PEagleFormat(folder), setup.place
    name = found.name("mask_hidden")
    width = found.checkpoint.stored(name).shape[-1]
    mask_state = found.checkpoint.tensor(name, 1, 1, width)[0]
    module = Eagle3Head(found, setup)
    if width != module.features.captured_width:
        raise ConfigError(
            f"{name} in {folder} has {width} values; {module.features.captured_width} follow from "
            "the layers that the module reads."
        )
    mask = place.put(mask_state)
    if module.projection:
        weight = found.checkpoint.tensor(found.name("fc.weight"), module.state_size, width)
        mask = F.linear(mask, place.put(weight))
    with torch.inference_mode():
        state = module.begin(mask)
    token = _number(found.checkpoint, "mask_token_id", "ptd_token_id")
    token = found.known_token(token, module.vocab_size)
    return PEagleHead(module, token, state, _depth(found.checkpoint))


class PEagleFormat(Eagle3Format):
    """A checkpoint of P-EAGLE. Raises `ConfigError` for another kind."""

    kind: ClassVar[str] = "peagle"


class PEagleHead(BlockHead):
    """An EAGLE-3 module with the row that stands for what is not known yet."""

    def __init__(
        self, module: Eagle3Head, mask_token: int, mask_state: Tensor, max_depth: int
    ) -> None:
        """`mask_state` [1, state_size] is what `begin` makes of the learnt states."""
        # Not the base's: it is the module that has layers and an embedding.
        self._module, self._mask_token, self._mask_state = module, mask_token, mask_state
        self.features, self.projection, self.uses = module.features, module.projection, module.uses
        self.vocab_size, self.max_model_len = module.vocab_size, module.max_model_len
        self.dtype, self.device = module.dtype, module.device
        self.kv_layers, self.state_size = module.kv_layers, module.state_size
        self.max_depth = max_depth

    def attention_traits(self) -> AttentionTraits:
        return self._module.attention_traits()

    def bind(self, pools: KVPools) -> None:
        self._module.bind(pools)

    def num_slots(self, depth: int) -> int:
        return depth - 1  # the last true row guesses, too

    def run(
        self, rows: Sequence[DraftInput], backend: AttentionBackend, page_size: int
    ) -> Tensor | None:
        slots = [self.num_slots(min(row.wanted, self.max_depth)) for row in rows if row.wanted]
        num_slots = [*slots, *[0] * (len(rows) - len(slots))]
        counts = [len(row.slice.token_ids) for row in rows]
        batch = pack(
            [
                RowSlice(
                    [*row.slice.token_ids, *[self._mask_token] * more],
                    row.slice.start,
                    row.slice.block_table,
                    1 + more,
                )
                for row, more in zip(rows, num_slots, strict=True)
            ],
            page_size,
            self.device,
        )
        true = self._module.begin(features_on(self.device, rows).to(self.dtype))
        # Of each token its state among the true ones, or the mask's, which is the last.
        ends = accumulate(counts)
        places = [
            place
            for end, count, more in zip(ends, counts, num_slots, strict=True)
            for place in (*range(end - count, end), *[len(true)] * more)
        ]
        at = torch.tensor(places).to(self.device, non_blocking=True)
        states = torch.cat((true, self._mask_state))[at]
        outputs = self._module.forward(batch.input_ids, states, backend(batch), 0)
        if len(outputs) != len(batch.logits_index):
            outputs = outputs.index_select(0, batch.logits_index)
        if not slots:
            return None
        depth = 1 + max(slots)
        first = [0, *accumulate(1 + more for more in slots)]
        # Slots that a row lacks repeat its last.
        pairs = list(zip(first, slots, strict=False))
        index = [[at + min(i, more) for i in range(depth)] for at, more in pairs]
        return outputs[torch.tensor(index).to(self.device)]

    def outputs(
        self, features: Tensor, tokens: Tensor, batches: LoopBatches, backend: AttentionBackend
    ) -> Tensor:
        first, width = batches.catch_up, len(batches.fed)
        true = self._module.begin(features.to(self.dtype))
        outputs = self._module.forward(first.input_ids, true, backend(first), 0)
        if len(outputs) != len(tokens):
            outputs = outputs.index_select(0, first.logits_index)
        if not width:
            return outputs[:, None]
        batch = batches.block(tokens.new_full((len(tokens), width), self._mask_token))
        states = self._mask_state.repeat(len(batch.input_ids), 1)  # it is written to
        slots = self._module.forward(batch.input_ids, states, backend(batch), 0)
        return torch.cat((outputs[:, None], slots.view(len(tokens), width, -1)), dim=1)

    def logits(self, outputs: Tensor) -> Tensor:
        return self._module.logits(outputs.contiguous())


def _depth(checkpoint: Checkpoint) -> int:
    """Return how many tokens the module was trained to guess at once."""
    given = _number(checkpoint, "para_depths", "num_parallel_depths")
    proposals: Any = checkpoint.group("speculators_config").get("proposal_methods")
    if given is None and isinstance(proposals, list) and proposals:
        given = proposals[0].get("speculative_tokens") if isinstance(proposals[0], dict) else None
    if given is None:
        return _DEFAULT_DEPTH
    if type(given) is not int or given < 1:
        raise ConfigError(f"config.json in {checkpoint.folder}: {given!r} tokens at once.")
    return given


def _number(checkpoint: Checkpoint, *keys: str) -> int | None:
    """Return the first of these settings that is a whole number."""
    values = (checkpoint.config.get(key) for key in keys)
    return next((value for value in values if type(value) is int), None)
