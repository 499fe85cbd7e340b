"""Synthetic acceptance, for benchmarks: rounds accept as many tokens as given rates say.

The n-th rate is how likely a round accepts at least n draft tokens, as vLLM's
`synthetic_acceptance_rates` has it. Engines that are forced to the same rates can be compared
whatever their drafts are worth. Drafting and the target's forward run as ever. The text is not the
target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.sampling.noise import Lane, lane_keys, seed_keys, uniforms
from outrider.engine.sampling.verification_rules import RuledRow
from outrider.engine.sampling.verify import ChooseAndVerify, VerifyBatch


def num_forced(keys: Tensor, positions: Tensor, rates: Tensor) -> Tensor:
    """Return how many tokens n rounds accept of drafts that are long enough: int64 [n].

    keys int64 [n, 2] of the requests' seeds; positions int64 [n] of the first draft tokens; rates
    float64 [k], not rising. One uniform number decides on a round.
    """
    uniform = uniforms(lane_keys(keys, Lane.ACCEPT), positions)
    return (uniform[:, None] < rates).sum(dim=1)


def force(drafts: Tensor, choices: Tensor, num_accepted: Tensor, vocab_size: int) -> Tensor:
    """Return choices of which the first `num_accepted` equal the drafts, and the next does not.

    drafts and choices int64 [n, k]; num_accepted int64 [n].
    """
    places = torch.arange(drafts.shape[1], device=drafts.device)
    others = torch.where(choices == drafts, (choices + 1) % vocab_size, choices)
    return torch.where(places < num_accepted[:, None], drafts, others)


def force_rows(drawn: Tensor, rows: Sequence[RuledRow], drafts: Tensor, vocab_size: int) -> None:
    """Put the choices of rows under synthetic acceptance into `drawn` [num_logits], in place.

    `drafts` int64 [rows, width] are theirs, on the device.
    """
    accepted = num_forced(
        seed_keys([row.sampling.seed for row in rows]),
        torch.tensor([row.position for row in rows]),
        torch.tensor(rows[0].verification.rates, dtype=torch.float64),  # all rows have the same
    )
    steps = torch.arange(drafts.shape[1])
    real = steps < torch.tensor([len(row.draft) for row in rows])[:, None]
    at = torch.tensor([row.first for row in rows])[:, None] + steps
    accepted, real, places = (
        each.to(drawn.device, non_blocking=True) for each in (accepted, real, at[real])
    )
    choices = torch.zeros_like(drafts)
    choices[real] = drawn[places]
    drawn[places] = force(drafts, choices, accepted, vocab_size)[real]


def forced_choices(
    choose_and_verify: ChooseAndVerify, rates: Sequence[float], device: torch.device
) -> ChooseAndVerify:
    """Return a `choose_and_verify` that accepts at these rates; captured steps may hold it."""
    on_device = torch.tensor(rates, dtype=torch.float64, device=device)

    def choose(logits: Tensor, batch: VerifyBatch, out: Tensor) -> None:
        choose_and_verify(logits, batch, out)
        drafts = batch.by_row(batch.input_ids, out.shape[1] - 1)[:, 1:]
        keys = batch.by_row(batch.sampling.seed, 1)[:, 0]
        positions = batch.by_row(batch.sampling.position, 1)[:, 0] + 1
        accepted = torch.minimum(num_forced(keys, positions, on_device), batch.draft_lens)
        choices = out[:, 1:-1]
        forced = force(drafts, choices.long(), accepted, logits.shape[1]).to(out.dtype)
        places = torch.arange(drafts.shape[1], device=out.device)
        out[:, 0] = accepted
        choices.copy_(torch.where(places < batch.draft_lens[:, None], forced, choices))

    return choose
