"""Load draft modules of each format: (folder, target's folder, dtype, device)."""

from functools import partial

from outrider.drafting.hidden_states.heads.base import load_head
from outrider.drafting.hidden_states.heads.dflash import DFlashHead
from outrider.drafting.hidden_states.heads.dspark import DSparkHead
from outrider.drafting.hidden_states.heads.eagle import EagleHead
from outrider.drafting.hidden_states.heads.eagle3 import Eagle3Head
from outrider.drafting.hidden_states.heads.medusa import read_medusa
from outrider.drafting.hidden_states.heads.mlp_speculator import read_mlp_speculator
from outrider.drafting.hidden_states.heads.mtp_loader import read_mtp
from outrider.drafting.hidden_states.heads.peagle import read_peagle

load_dflash = partial(load_head, DFlashHead.read)
load_dspark = partial(load_head, DSparkHead.read)
load_eagle = partial(load_head, EagleHead.read)
load_eagle3 = partial(load_head, Eagle3Head.read)
load_medusa = partial(load_head, read_medusa)
load_mlp_speculator = partial(load_head, read_mlp_speculator)
load_mtp = partial(load_head, read_mtp)
load_peagle = partial(load_head, read_peagle)
