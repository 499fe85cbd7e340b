"""The guesses of a head without keys and values, recorded: one replay for any number of levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.graphs.loop_inputs import LoopInputs, LoopShape
from outrider.drafting.graphs.loops import Capture, CapturedLoops
from outrider.drafting.graphs.recurrent_heads import FeatureRows
from outrider.drafting.hidden_states.forward import LEAD
from outrider.drafting.hidden_states.heads.base import OneShotHead
from outrider.drafting.hidden_states.trees import TargetDraws
from outrider.engine.batch import RowSlice
from outrider.params import SamplingParams

_ALL_POSITIONS: Final = 2**30  # on one page, which nobody reads


class OneShotLoops:
    """`head`'s guesses of `width`, by recorded loops of one row to catch up.

    `num_tokens` of their shapes are levels, of all of which there are loops of as many rows.
    Building it records them. Used from one thread.
    """

    def __init__(self, head: OneShotHead, recording: Capture, width: int) -> None:
        self._head = head
        self._width = width
        self._draws = recording.draws
        self._inputs = LoopInputs(
            recording.shapes,
            max_model_len=_ALL_POSITIONS,
            page_size=2 * _ALL_POSITIONS,
            scratch_page=0,
            device=head.device,
            lead=LEAD,
        )
        self._most = max(shape.rows for shape in recording.shapes)
        self._features = FeatureRows(self._most, head.features.width, head.device)
        self._loops = CapturedLoops(recording, self._inputs, self._loop, self._output_shape)

    def guess(
        self,
        features: Sequence[Tensor],
        tokens: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        depth: int,
    ) -> NDArray[np.int32]:
        """What `OneShotHead.guess` returns, of `depth` levels or more; some loop must have them.

        `features` are each row's last known state, bfloat16 [1, width] on the host, `tokens` its
        committed text.
        """
        slices = [RowSlice(text[-1:], len(text) - LEAD, (), 1) for text in tokens]
        guesses: list[NDArray[np.int32]] = []
        for start in range(0, len(slices), self._most):
            rows = slice(start, start + self._most)
            shape = self._loops.find(slices[rows], sampling[rows], depth, 0)
            assert shape is not None
            self._features.fill(features[rows])
            guesses.append(self._loops.run(shape, slices[rows], sampling[rows]))
        return np.concatenate(guesses)

    def _loop(self, shape: LoopShape) -> Tensor:
        rows = self._inputs.rows(shape)
        draws = TargetDraws(rows.sampling, self._draws.noised)
        states = self._features.first(shape.rows)
        return self._head.guess(states, rows.tokens[:, 0], draws, shape.num_tokens, self._width)

    def _output_shape(self, shape: LoopShape) -> tuple[int, ...]:
        self._inputs.fill(shape, (), ())
        with torch.inference_mode():
            return tuple(self._loop(shape).shape)
