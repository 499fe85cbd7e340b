"""The formats of multi-token prediction heads: names of tensors, and families of decoder layers.

Sources: DeepSeek-V3's README_WEIGHTS, Qwen3-Next and Qwen3.5 as published, RTP-LLM's loaders.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from outrider.drafting.hidden_states.heads.llama import Rotary
from outrider.drafting.hidden_states.heads.mtp import ModuleWeights
from outrider.engine.attention.base import ATTENTION_NAME
from outrider.errors import ConfigError
from outrider.models.facts import MTP_TENSORS


@dataclass(frozen=True, slots=True)
class Family:
    """A package of `transformers` whose decoder layer a module holds."""

    package: str
    prefix: str  # of its classes
    text: str = ""  # in the names of the config and the rotary embedding
    typed_layers: bool = False  # config.layer_types says the kind of each layer
    settings: Mapping[str, Any] | None = None  # these make every layer like a module's
    llama: bool = False  # a Llama-like layer, run by `LlamaModule`
    gated: bool = False  # and with Qwen3.5's conventions
    grids: int = 0  # its rotary embedding takes positions in so many grids: alike in a text

    def config(self, values: Mapping[str, Any], num_modules: int) -> Any:
        """Return the config of `num_modules` layers, from the settings of config.json."""
        changed = {**values, **(self.settings or {}), "num_hidden_layers": num_modules}
        if self.typed_layers:
            changed["layer_types"] = ["full_attention"] * num_modules
        module = import_module(f"transformers.models.{self.package}.configuration_{self.package}")
        config = getattr(module, f"{self.prefix}{self.text}Config").from_dict(changed)
        config._attn_implementation = ATTENTION_NAME
        config._experts_implementation = "grouped_mm"
        return config

    def weights(self, config: Any, index: int) -> ModuleWeights:
        """Return one module, without memory for its weights."""
        layer = getattr(self._modeling, f"{self.prefix}DecoderLayer")
        with torch.device("meta"):
            return ModuleWeights(
                layer(config, index), int(config.hidden_size), float(config.rms_norm_eps)
            )

    def rotary(self, config: Any, device: torch.device) -> Rotary:
        """Return the rotary embedding, which takes positions [1, n]."""
        name = f"{self.prefix}{self.text}RotaryEmbedding"
        rotary: Rotary = getattr(self._modeling, name)(config).to(device)
        if not self.grids:
            return rotary
        return lambda x, positions: rotary(x, positions.expand(self.grids, -1, -1))

    @property
    def _modeling(self) -> Any:
        return import_module(f"transformers.models.{self.package}.modeling_{self.package}")


@dataclass(frozen=True, slots=True)
class MtpFormat:
    """The names of a format's tensors; `{i}` is the module's number in the checkpoint."""

    name: str
    marker: str  # matches names that only modules of this format have; groups their number
    root: str  # comes before the names of all of a module's tensors,
    layer: str  # and before those of its decoder layer
    parts: tuple[str, str, str, str]  # the format's enorm, hnorm, eh_proj, norm, after the root
    families: Mapping[str, Family]  # by model_type
    copies: tuple[str, ...] = ()  # further tensors of a module, which the target holds as well
    hidden_first: bool = False  # the projection is of [h; e], and stored [2 H, H]
    own_vocabulary: bool = False  # embedding and head may be the checkpoint's own

    def stored_name(self, name: str, number: int) -> str:
        """Return the checkpoint's name of a module's tensor `name` (see `ModuleWeights`)."""
        part = dict(zip(("enorm", "hnorm", "eh_proj", "norm"), self.parts, strict=True)).get(
            name.removesuffix(".weight")
        )
        if part is not None:
            return f"{self.root}{part}.weight".format(i=number)
        return self.layer.format(i=number) + name.removeprefix("block.")

    def numbers(self, names: Collection[str]) -> list[int]:
        """Return the numbers of the modules among `names`, in order."""
        found = (re.fullmatch(self.marker, name) for name in names)
        return sorted({int(match[1]) for match in found if match})


_QWEN2 = Family("qwen2", "Qwen2", typed_layers=True, llama=True)
_QWEN3_5 = Family("qwen3_5", "Qwen3_5", "Text", typed_layers=True, llama=True, gated=True, grids=3)
_QWEN3_5_MOE = Family("qwen3_5_moe", "Qwen3_5Moe", "Text", typed_layers=True, grids=3)
_FORMATS = (
    MtpFormat(
        name="DeepSeek",
        marker=MTP_TENSORS["DeepSeek"],
        root="model.layers.{i}.",
        layer="model.layers.{i}.",
        parts=("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        families={
            "deepseek_v3": Family(
                "deepseek_v3", "DeepseekV3", settings={"first_k_dense_replace": 0}
            ),
            "glm4_moe": Family("glm4_moe", "Glm4Moe", settings={"first_k_dense_replace": 0}),
        },
        copies=("embed_tokens.weight", "shared_head.head.weight", "self_attn.rotary_emb.inv_freq"),
    ),
    MtpFormat(
        name="Qwen",
        marker=MTP_TENSORS["Qwen"],
        root="mtp.",
        layer="mtp.layers.{i}.",
        parts=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        families={
            "qwen3_next": Family(
                "qwen3_next",
                "Qwen3Next",
                typed_layers=True,
                settings={"mlp_only_layers": [], "decoder_sparse_step": 1},
            ),
            "qwen3_5": _QWEN3_5,
            "qwen3_5_text": _QWEN3_5,
            "qwen3_5_moe": _QWEN3_5_MOE,
            "qwen3_5_moe_text": _QWEN3_5_MOE,
        },
    ),
    MtpFormat(
        name="RTP-LLM",
        marker=MTP_TENSORS["RTP-LLM"],
        root="model.layers.{i}.",
        layer="model.layers.{i}.",
        parts=("e_norm", "h_norm", "eh_proj", "final_head.norm"),
        families={
            "qwen2": _QWEN2,
            "qwen_2-mtp": _QWEN2,
            "qwen3": Family("qwen3", "Qwen3", typed_layers=True, llama=True),
            "llama": Family("llama", "Llama", llama=True),
        },
        hidden_first=True,
        own_vocabulary=True,
    ),
)


def detect(names: Collection[str]) -> tuple[MtpFormat, list[int]]:
    """Return the format of a checkpoint with these tensors, and its modules' numbers.

    Raises `ConfigError` if there is no module of a known format, or a gap between them.
    """
    for stored in _FORMATS:
        numbers = stored.numbers(names)
        if numbers:
            if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
                raise ConfigError(
                    f"The prediction modules of the draft have the numbers {numbers}: "
                    "there is a gap."
                )
            return stored, numbers
    raise ConfigError(
        "The draft holds no multi-token prediction module: there is none of the tensors "
        "model.layers.N.enorm.weight (DeepSeek), mtp.layers.0.input_layernorm.weight (Qwen) and "
        "model.layers.0.e_norm.weight (RTP-LLM)."
    )


def family_of(stored: MtpFormat, config: Mapping[str, Any]) -> Family:
    """Return the family of the modules' layer, by the config's model_type."""
    kind = str(config.get("model_type"))
    if kind not in stored.families:
        known = ", ".join(stored.families)
        raise ConfigError(
            f"The draft's config.json has the model_type {kind!r}; modules of {stored.name}'s "
            f"format are known for {known}."
        )
    return stored.families[kind]
