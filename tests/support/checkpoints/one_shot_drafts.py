"""Small random one-shot heads, and what they draft for random requests."""

from __future__ import annotations

import random

import torch

from outrider.draft_tree import DraftTree
from outrider.drafting.graphs.loops import LoopCapture
from outrider.drafting.hidden_states.heads.base import OneShotHead
from outrider.drafting.hidden_states.heads.medusa import MedusaHead
from outrider.drafting.hidden_states.heads.mlp_speculator import MlpSpeculatorHead, SpeculatorStage
from outrider.drafting.hidden_states.one_shot import OneShotProposer
from outrider.drafting.proposer import ProposerLimits, SessionStart
from outrider.params import SamplingParams, VerificationRule
from tests.support.checkpoints import one_shot_checkpoints as made

DEPTH, MAX_LEN, NUM_SESSIONS = 3, 64, 6
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=1.2, seed=2**31, top_k=12, top_p=0.9, min_p=0.01),
)


def medusa(dtype: torch.dtype, device: torch.device) -> OneShotHead:
    tensors = {name: each.to(device, dtype) for name, each in made.medusa(heads=DEPTH).items()}
    blocks = [
        ((tensors[f"{i}.0.linear.weight"], tensors[f"{i}.0.linear.bias"]),) for i in range(DEPTH)
    ]
    heads = [tensors[f"{i}.1.weight"] for i in range(DEPTH)]
    return MedusaHead(blocks, heads, made.VOCAB)


def mlp_speculator(dtype: torch.dtype, device: torch.device) -> OneShotHead:
    config = made.mlp_config(n_predict=DEPTH, tied=False, scaled=True)
    tensors = {name: each.to(device, dtype) for name, each in made.mlp_speculator(config).items()}

    def stage(i: int) -> SpeculatorStage:
        emb, proj, ln, head = (
            tensors[f"speculator.{name}.{i}.weight"] for name in ("emb", "proj", "ln", "head")
        )
        return SpeculatorStage(emb, proj, ln, tensors[f"speculator.ln.{i}.bias"], head)

    return MlpSpeculatorHead([stage(i) for i in range(DEPTH)], scale_input=True)


HEADS = {"medusa": medusa, "mlp_speculator": mlp_speculator}


def drafts(head: OneShotHead, tree_width: int, capture: LoopCapture | None) -> list[DraftTree]:
    """Those of random requests, which do not depend on what is drafted."""
    method = OneShotProposer(
        head,
        method="medusa",
        name="test",
        limits=ProposerLimits(max_model_len=MAX_LEN, tree_width=tree_width),
        capture=capture,
    )
    rng = random.Random(tree_width)
    states = made.random(MAX_LEN, made.HIDDEN, seed=9, std=1.0).bfloat16()
    lengths = {key: rng.randint(2, 12) for key in range(NUM_SESSIONS)}
    for key, length in lengths.items():
        prefix = [rng.randrange(made.VOCAB) for _ in range(length)]
        sampled = key == 0  # for rejection, which no loop draws for
        rule = VerificationRule.REJECTION if sampled else VerificationRule.COUPLED
        sampling = SAMPLINGS[1] if sampled else SAMPLINGS[key % 3]
        method.open(key, SessionStart(prefix, sampling, rng.randint(1, 9), MAX_LEN, rule=rule))
        method.features(key, 0, states[: length - 1].view(torch.int16).numpy().tobytes())
    found: list[DraftTree] = []
    for _ in range(10):
        asked = [key for key in lengths if rng.random() < 0.7]
        found += [tree for _, tree in sorted(method.draft(asked).drafts)]
        for key, length in lengths.items():
            more = rng.randint(1, 4)
            rows = states[length - 1 : length + more - 1].view(torch.int16).numpy().tobytes()
            method.features(key, length - 1, rows)
            tokens = [rng.randrange(made.VOCAB) for _ in range(more)]
            method.commit(key, length, tokens, rng.randint(1, 9))
            lengths[key] += more
    return found
