"""A rank of two, of which the leader takes longer to load than a call may take."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import torch

import outrider.engine.model.loader as loader
from outrider.engine.layers.ops import LlamaOps, TorchOps
from outrider.engine.model.parallel.ranks import RankGroup, Ranks
from tests.support.models.shards import DEADLINE_S, load

CALL_S: Final = 2.5


class SlowOps(TorchOps):
    """Choose their products for longer than a call may take."""

    def tune(self, _uses: object) -> None:
        time.sleep(2 * CALL_S)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.of(os.environ)
    assert ranks is not None

    def choose(*_: object, **__: object) -> LlamaOps:
        return SlowOps() if ranks.leads else TorchOps()

    loader.choose_llama_ops = choose
    device = torch.device("cpu")
    group = RankGroup(ranks, device, start_timeout_s=DEADLINE_S, timeout_s=CALL_S)
    model = load(Path(folder), torch.float64, group)
    if ranks.leads:
        group.stop()
    else:
        group.follow(model)
