"""Load draft modules of each format: (folder, target's folder, dtype, device)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from outrider.drafting.hidden_states.heads.base import HeadSetup, Place
from outrider.drafting.hidden_states.heads.dflash import DFlashHead
from outrider.drafting.hidden_states.heads.dspark import DSparkHead
from outrider.drafting.hidden_states.heads.eagle import EagleHead
from outrider.drafting.hidden_states.heads.eagle3 import Eagle3Head
from outrider.drafting.hidden_states.heads.medusa import read_medusa
from outrider.drafting.hidden_states.heads.mlp_speculator import read_mlp_speculator
from outrider.drafting.hidden_states.heads.mtp_loader import read_mtp
from outrider.drafting.hidden_states.heads.peagle import read_peagle
from outrider.engine.model.loader import choose_llama_ops

T = TypeVar("T")


def _load(
    read: Callable[[Path, HeadSetup], T],
    folder: Path,
    target: Path,
    dtype: torch.dtype,
    device: torch.device,
    **settings: Any,
) -> T:
    place = Place(dtype, device, choose_llama_ops(device, dtype))
    return read(folder, HeadSetup(target, place, **settings))


load_dflash = partial(_load, DFlashHead.read)
load_dspark = partial(_load, DSparkHead.read)
load_eagle = partial(_load, EagleHead.read)
load_eagle3 = partial(_load, Eagle3Head.read)
load_medusa = partial(_load, read_medusa)
load_mlp_speculator = partial(_load, read_mlp_speculator)
load_mtp = partial(_load, read_mtp)
load_peagle = partial(_load, read_peagle)
