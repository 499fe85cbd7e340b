"""A draft loop's sampler by torch's own operations, on any device.

Not to be captured on a GPU where rows have cuts, which wait for the device.
"""

from outrider.drafting.graphs.loops import DraftSampler
from outrider.drafting.likeliest import likeliest, top_candidates
from outrider.engine.sampling.coupled import sample

TORCH_SAMPLER = DraftSampler(sample, top_candidates, likeliest)
