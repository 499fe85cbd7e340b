"""One tensor-parallel rank of vLLM in a process: what its proposer returns, step by step.

    python -m tests.support.services.vllm_ranks RANK RANKS FILE

The ranks meet at FILE and talk through gloo. Rank 0 hosts the draft side. Each prints the drafts of
every step as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.support.services.vllm_steps import CONTEXT, K, VllmSteps

BATCHES = (("a", "b"), ("a", "b"), ("b",), ("a", "b"), ("a", "b"), ("a",), ("a", "b"))
FAULTY = 4  # the step in which the draft side fails


async def main(rank: int, ranks: int, file: str) -> None:
    """Run the steps of `BATCHES` as one rank."""
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=60),
    )  # fmt: skip

    def broadcast_object(value: object) -> object:
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    group = SimpleNamespace(rank_in_group=rank, broadcast_object=broadcast_object)
    state: Any = ModuleType("vllm.distributed.parallel_state")
    state.get_tp_group = lambda: group
    for name in ("vllm", "vllm.distributed"):
        sys.modules[name] = ModuleType(name)
    sys.modules[state.__name__] = state

    patched = pytest.MonkeyPatch()
    world = VllmSteps(patched)
    patched.undo()  # the drafts are really shared
    if rank:
        world.plugin._host = None
    else:
        peer = world.attach()
    for number, names in enumerate(BATCHES):
        if rank == 0:
            for name in names if number else ():
                world.post(peer, world.block(name, length=2 + number % 3))
            if number == FAULTY:
                patched.setattr(world.host, "choose_drafts", _fail)
            print(json.dumps(list(world.step(*names).values())))
            patched.undo()
        else:  # it samples as rank 0 does, and drafts nothing itself
            world.batch.req_ids = list(names)
            drafts = world.plugin.propose(
                [[1]] * len(names),
                np.ones(len(names), dtype=np.int32),
                np.ones((len(names), CONTEXT + K + 1), dtype=np.int32),
            )
            print(json.dumps(drafts))
    dist.barrier()  # nobody leaves while another still reads
    dist.destroy_process_group()


def _fail(*_: object) -> Any:
    raise RuntimeError("the draft side failed")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))  # a hub needs a loop
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread of gloo's may still run, which aborts a process that ends as usual
