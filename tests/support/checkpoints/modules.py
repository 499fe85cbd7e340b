"""A small checkpoint of every format that draft modules are published in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import block_checkpoints as block
from tests.support.checkpoints import eagle_checkpoints as eagle
from tests.support.checkpoints import mtp_checkpoints as mtp
from tests.support.checkpoints import one_shot_checkpoints as one_shot
from tests.support.checkpoints.loading import (
    load_dflash,
    load_dspark,
    load_eagle,
    load_eagle3,
    load_medusa,
    load_mlp_speculator,
    load_mtp,
    load_peagle,
)

LOADERS: Mapping[str, Callable[..., Any]] = {
    "eagle": load_eagle,
    "eagle3": load_eagle3,
    "dflash": load_dflash,
    "dspark": load_dspark,
    "peagle": load_peagle,
    "mtp": load_mtp,
    "medusa": load_medusa,
    "mlp_speculator": load_mlp_speculator,
}


@dataclass(frozen=True, slots=True)
class ModuleFormat:
    """A format of `method`; `write` returns the folders of a module and of its target."""

    method: str
    write: Callable[[Path], tuple[Path, Path]]

    def load(self, module: Path, target: Path) -> Any:
        return LOADERS[self.method](module, target, torch.float32, torch.device("cpu"))


def _eagle(root: Path, tensors: Callable[[], eagle.Tensors], **config: Any) -> tuple[Path, Path]:
    target = eagle.save_target(root / "target")
    settings = {**eagle.LLAMA, **config}
    folder = eagle.save_head(root / "module", tensors(), settings, eagle.save_safetensors)
    return folder, target


def _one_shot(
    root: Path, config: Mapping[str, Any], tensors: one_shot.Tensors, file: str
) -> tuple[Path, Path]:
    sizes = {"hidden_size": one_shot.HIDDEN, "vocab_size": one_shot.VOCAB, "num_hidden_layers": 2}
    shared = {"model.embed_tokens.weight": (7, 0.5), "lm_head.weight": (8, 0.5)}
    of_target = {
        name: one_shot.random(one_shot.VOCAB, one_shot.HIDDEN, seed=seed, std=std)
        for name, (seed, std) in shared.items()
    }
    settings = {"model_type": "llama", "tie_word_embeddings": False, **sizes}
    target = one_shot.save(root / "target", settings, of_target, "model.safetensors")
    return one_shot.save(root / "module", config, tensors, file), target


def _inside(tensors: one_shot.Tensors) -> one_shot.Tensors:
    return {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}


def _mlp(root: Path, *, tied: bool) -> tuple[Path, Path]:
    config = one_shot.mlp_config(tied=tied, scaled=tied)
    return _one_shot(root, config, one_shot.mlp_speculator(config), "model.safetensors")


_SPECULATORS: Mapping[str, Any] = {
    "speculators_model_type": "eagle3",
    "transformer_layer_config": eagle.LLAMA,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
}
FORMATS: Mapping[str, ModuleFormat] = {
    "EAGLE-1 and EAGLE-2": ModuleFormat("eagle", partial(_eagle, tensors=eagle.eagle_tensors)),
    "EAGLE-3": ModuleFormat("eagle3", partial(_eagle, tensors=eagle.eagle3_tensors)),
    "EAGLE-3 by speculators": ModuleFormat(
        "eagle3",
        partial(
            _eagle,
            tensors=partial(eagle.eagle3_tensors, layer="layers.0.", embedding=True),
            **_SPECULATORS,
        ),
    ),
    "DFlash": ModuleFormat(
        "dflash", lambda root: _eagle(root, block.dflash_tensors, **block.DFLASH)
    ),
    "DFlash by speculators": ModuleFormat(
        "dflash",
        lambda root: _eagle(
            root, partial(block.dflash_tensors, draft_vocab=40), **block.SPECULATORS
        ),
    ),
    "DSpark": ModuleFormat("dspark", partial(_eagle, tensors=block.dspark_tensors, **block.DSPARK)),
    "P-EAGLE": ModuleFormat(
        "peagle", partial(_eagle, tensors=block.peagle_tensors, **block.PEAGLE)
    ),
    "DeepSeek-V3's MTP layers": ModuleFormat("mtp", lambda root: mtp.deepseek().write(root)),
    "DeepSeek-V3's MTP layer, exported": ModuleFormat(
        "mtp", lambda root: mtp.deepseek(in_target=False).write(root)
    ),
    "float8 MTP layers": ModuleFormat(
        "mtp", lambda root: mtp.to_block_fp8(mtp.deepseek(), 16).write(root)
    ),
    "GLM-4.5's MTP layer": ModuleFormat("mtp", lambda root: mtp.glm4_moe().write(root)),
    "Qwen3-Next's MTP layer": ModuleFormat("mtp", lambda root: mtp.qwen("qwen3_next").write(root)),
    "Qwen3.5's MTP layer": ModuleFormat("mtp", lambda root: mtp.qwen("qwen3_5").write(root)),
    "Qwen3.5's MTP layer with experts": ModuleFormat(
        "mtp", lambda root: mtp.qwen("qwen3_5_moe").write(root)
    ),
    "RTP-LLM's qwen_2-mtp": ModuleFormat("mtp", lambda root: mtp.rtp_qwen2().write(root)),
    "Medusa-1": ModuleFormat(
        "medusa", lambda root: _one_shot(root, {}, one_shot.medusa(), "medusa_lm_head.pt")
    ),
    "Medusa-2": ModuleFormat(
        "medusa",
        lambda root: _one_shot(root, {}, _inside(one_shot.medusa()), "model.safetensors"),
    ),
    "vLLM's Medusa": ModuleFormat(
        "medusa",
        lambda root: _one_shot(
            root, {}, one_shot.medusa_vllm(one_shot.medusa()), "model.safetensors"
        ),
    ),
    "MLP speculator": ModuleFormat("mlp_speculator", partial(_mlp, tied=False)),
    "MLP speculator, tied": ModuleFormat("mlp_speculator", partial(_mlp, tied=True)),
}
