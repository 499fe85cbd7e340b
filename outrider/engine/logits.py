"""What changes a row's logits before its token is chosen: masks, biases, penalties.

One row of logits is processed in vLLM's order: constraint mask, min_tokens mask, logit_bias,
repetition, frequency and presence penalties; then the greedy argmax, or temperature, top_k, top_p,
min_p and noise (`sampling`).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from outrider.params import TokenIds


class LogitsEditor(Protocol):
    """Edits the logits of one sequence. Only the scheduler commits to it.

    Its state follows from the committed tokens alone, so rejected drafts and preemption need no
    undoing.
    """

    def edit(self, logits: Tensor, draft: TokenIds) -> None:
        """In place. logits float32 [len(draft) + 1, vocab_size].

        Row j is what comes after the output so far and draft[:j]: it must become what `edit` with
        no draft would make of it once draft[:j] were committed.
        """
        ...

    def commit(self, tokens: TokenIds) -> None:
        """Output tokens became true; trimmed at a stop."""
        ...
