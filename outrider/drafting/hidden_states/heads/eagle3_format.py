"""The names and layer numbers of EAGLE-3 checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from outrider.aux_layers import KEY, aux_layers, default_layers
from outrider.drafting.hidden_states.heads.format import HeadFormat
from outrider.errors import ConfigError

_NAMES = {"eagle3": "EAGLE-3", "peagle": "P-EAGLE"}


class Eagle3Format(HeadFormat):
    """A checkpoint as its authors publish it (`yuhuili/EAGLE3-*`), or as `speculators` does."""

    kind: ClassVar[str] = "eagle3"  # as `speculators` calls it

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        names, root = self.checkpoint.names, self.root
        kind = self.checkpoint.config.get("speculators_model_type", "eagle3")
        if kind != self.kind:
            raise ConfigError(
                f"{folder} holds a speculator of type {kind!r}, not an {_NAMES[self.kind]} module."
            )
        first = "midlayer." if any(n.startswith(f"{root}midlayer.") for n in names) else "layers.0."
        later = [f"layers.{i}." for i in range(1, self.num_layers())]
        self.layer_prefixes = [root + name for name in (first, *later)]

    def flag(self, key: str, suffix: str | None = None) -> bool:
        """Return a setting; where config.json is silent, whether its tensor is there."""
        value = self.checkpoint.config.get(key, self.checkpoint.group("eagle_config").get(key))
        if value is None:
            return suffix is not None and self.name(suffix) in self.checkpoint
        return bool(value)

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers, of the target's `num_layers`, whose inputs the module reads."""
        config, where = self.checkpoint.config, self.checkpoint.folder
        if self.checkpoint.group("eagle_config").get("use_aux_hidden_state") is False:
            raise ConfigError(f"{where}: use_aux_hidden_state false is not supported.")
        layers = aux_layers(config)
        if layers is None:
            if num_layers < 7:
                raise ConfigError(f"config.json in {where} must have {KEY} for so few layers.")
            return default_layers(num_layers)
        if layers[-1] > num_layers:
            raise ConfigError(
                f"config.json in {where}: {KEY} reads what enters layer {layers[-1]} of a target "
                f"that has {num_layers}."
            )
        return layers
