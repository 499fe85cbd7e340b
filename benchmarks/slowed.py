"""A scorer or proposer whose forwards take at least so long. For benchmarks only.

    python -m benchmarks.slowed scorer|proposer --forward-ms 30 [the service's flags]

On a CPU the embedded pair then has the time ratios of large models on two accelerators: while a
forward sleeps, the other process has the cores. The text is what it always is.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from unittest import mock

from torch import Tensor

from benchmarks.wrapped import leave


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal; returns the exit code."""
    p = argparse.ArgumentParser(description=__doc__, add_help=False)
    p.add_argument("service", choices=("scorer", "proposer"))
    p.add_argument("--forward-ms", type=float, required=True)
    ours, flags = p.parse_known_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from outrider.drafting.cpu.llama_chains import LlamaChains
    from outrider.engine.batch import PackedBatch
    from outrider.engine.model.paged_model import PagedModel

    forward = PagedModel.forward

    def slowed(self: PagedModel, batch: PackedBatch) -> Tensor:
        due = time.perf_counter() + ours.forward_ms * 1e-3
        logits = forward(self, batch)
        time.sleep(max(0.0, due - time.perf_counter()))
        return logits

    # The compiled draft loop is one call: its forwards could not be slowed one by one.
    compiled = mock.patch.object(LlamaChains, "load", return_value=None)
    # Who sleeps takes nothing from the other: as on a device of its own.
    device = mock.patch("outrider.device.device_id", return_value=f"slowed {ours.service}")
    with mock.patch.object(PagedModel, "forward", slowed), compiled, device:
        if ours.service == "scorer":
            from scorer_service import __main__ as scorer

            return scorer.main(flags)
        from proposer_service import __main__ as proposer

        return proposer.main(flags)


if __name__ == "__main__":
    leave(main())
