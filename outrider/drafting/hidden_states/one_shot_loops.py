"""Captured guesses of a head without keys and values, one replay for any number of levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.graphs.loop_inputs import LoopInputs, LoopShape
from outrider.drafting.graphs.loops import CapturedLoops, LoopCapture
from outrider.drafting.hidden_states.forward import LEAD, FeatureRows
from outrider.drafting.hidden_states.heads.base import OneShotHead
from outrider.drafting.hidden_states.trees import TargetDraws
from outrider.engine.batch import RowSlice
from outrider.engine.graphs.staging import PageLayout
from outrider.params import SamplingParams

_ALL_POSITIONS: Final = 2**30  # on one page, which nobody reads


class OneShotLoops:
    """Guesses of `width` by captured loops of one row to catch up. Used from one thread.

    `num_tokens` of their shapes are levels. There are loops of as many rows for all levels.
    """

    def __init__(self, head: OneShotHead, capture: LoopCapture, width: int) -> None:
        self._head = head
        self._width = width
        self._sampler = capture.sampler
        layout = PageLayout(_ALL_POSITIONS, 2 * _ALL_POSITIONS, 0, head.device)
        self._inputs = LoopInputs(capture.shapes, layout, LEAD)
        self._most = max(shape.rows for shape in capture.shapes)
        self._features = FeatureRows(self._most, head.features.width, head.device)
        self._loops = CapturedLoops(capture, self._inputs, self._loop, self._output_shape)

    def guess(
        self,
        features: Sequence[Tensor],
        tokens: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        depth: int,
    ) -> NDArray[np.int32]:
        """Return what `OneShotHead.guess` does, of `depth` levels or more, which a loop must have.

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
        draws = TargetDraws(rows.sampling, self._sampler.noised)
        states = self._features.first(shape.rows)
        return self._head.guess(states, rows.tokens[:, 0], draws, shape.num_tokens, self._width)

    def _output_shape(self, shape: LoopShape) -> tuple[int, ...]:
        self._inputs.fill(shape, (), ())
        with torch.inference_mode():
            return tuple(self._loop(shape).shape)
