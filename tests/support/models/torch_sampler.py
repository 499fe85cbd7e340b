"""A draft loop's sampler by torch's own operations, on any device.

Not to be captured on a GPU where rows have cuts, which wait for the device.
"""

from outrider.drafting.graphs.loops import DraftSampler

TORCH_SAMPLER = DraftSampler()
