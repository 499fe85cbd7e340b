"""The forwards of a draft module in one round, as those of a language model."""

from __future__ import annotations

from torch import Tensor

from outrider.drafting.hidden_states.heads.base import RecurrentHead
from outrider.engine.attention.base import AttentionBackend
from outrider.engine.batch import PackedBatch

LEAD = 2
"""Row p of a draft module reads the token at p + 1 and predicts that at p + 2."""


class HeadForward:
    """Forwards of which the first takes true states, and each later one its predecessor's."""

    def __init__(
        self, head: RecurrentHead, backend: AttentionBackend, page_size: int, features: Tensor
    ) -> None:
        self._head = head
        self._backend = backend
        self.page_size = page_size
        self.device, self.max_model_len = head.device, head.max_model_len
        self._states = head.begin(features)  # [tokens of the first batch, state_size]
        self._outputs = self._states  # of the latest forward, where logits were wanted
        self._step = 0

    def forward(self, batch: PackedBatch, sources: Tensor | None = None) -> Tensor:
        """Write keys and values and return logits [num_logits, vocab_size].

        Each token continues one of the outputs of the forward before: `sources` int64 [tokens]
        says which. None: the first token the first, and so on.
        """
        head, step = self._head, self._step
        if step:
            count = len(batch.input_ids)
            outputs = self._outputs[:count] if sources is None else self._outputs[sources]
            states = head.feed_back(outputs)
        else:
            states = self._states
        outputs = head.forward(batch.input_ids, states, self._backend(batch), step)
        if len(batch.logits_index) != len(outputs):
            outputs = outputs.index_select(0, batch.logits_index)
        self._outputs = outputs
        self._step += 1
        return head.logits(outputs)
