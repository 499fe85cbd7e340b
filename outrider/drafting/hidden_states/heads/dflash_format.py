"""The settings of DFlash checkpoints, as z-lab and `speculators` publish them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from outrider.aux_layers import INPUT_KEY, OUTPUT_KEY, block_layers, block_setting
from outrider.drafting.hidden_states.checkpoints import TargetTensors
from outrider.drafting.hidden_states.heads.format import HeadFormat
from outrider.errors import ConfigError

_DEFAULT_BLOCK = {"speculators": 8, "z-lab": 16}
_MARKS = {
    "attention_conv": "DFlash2",
    "candidate_selector": "DFlash2",
    "prefix_gru": "Domino",
    "markov_head": "DSpark",
    "confidence_head": "DSpark",
}
"""Parts of tensors' names -> the kind of module that has them."""
_SAID = {"dflash2": "DFlash2", "dspark": "DSpark", "dflash": "DFlash"}
"""Parts of what config.json calls the module -> its kind."""


class DFlashFormat(HeadFormat):
    """A checkpoint of a DFlash module. Raises `ConfigError`, naming what does not fit."""

    kind: ClassVar[str] = "DFlash"
    samples_from_anchor: ClassVar[bool] = False
    """Where config.json does not say, the anchor's own slot guesses, too."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        config = self.checkpoint.config
        kind = self._kind(str(config.get("speculators_model_type", config.get("architectures"))))
        if kind != self.kind:
            raise ConfigError(f"{folder} holds a {kind} module, not a {self.kind} module.")
        if (folder / "mask_embedding.pt").exists():
            raise ConfigError(
                f"{folder}: mask_embedding.pt, an embedding of its own for the mask "
                "token, is not supported."
            )
        origin = "speculators" if "speculators_model_type" in config else "z-lab"
        self.block_size = self._whole("block_size", _DEFAULT_BLOCK[origin], least=2)
        self.from_anchor = bool(self._setting("sample_from_anchor", self.samples_from_anchor))
        count = self.num_layers()
        self.layer_prefixes = [f"{self.root}layers.{i}." for i in range(count)]
        self.windows, self.causal = self._attention(count)
        self.embedding_scale = self._number("input_embedding_scale", 1.0)
        self.output_multiplier = self._number("output_multiplier", 1.0)
        self.softcap = self._number("final_logit_softcapping", 0.0)

    @property
    def max_depth(self) -> int:
        """Tokens that a block foresees."""
        return self.block_size - (not self.from_anchor)

    def mask_token(self, vocab_size: int) -> int:
        """Return the token that fills the slots, below `vocab_size`. Raises `ConfigError`."""
        return self.known_token(self._whole("mask_token_id", None), vocab_size)

    def layers(self, target: TargetTensors) -> tuple[int, ...]:
        """Return the states of the target that the module reads. Raises `ConfigError`."""
        where = self.checkpoint.folder
        found = block_layers(self.checkpoint.config, str(where))
        if found[-1] > target.num_layers:
            raise ConfigError(
                f"config.json in {where}: {OUTPUT_KEY} or {INPUT_KEY} name a layer behind the last "
                f"of the target, which has {target.num_layers}."
            )
        return found

    def _kind(self, said: str) -> str:
        """Return the kind of the module, by its tensors or else by what config.json says."""
        for part, kind in _MARKS.items():
            if any(part in name for name in self.checkpoint.names):
                return kind
        return next((kind for part, kind in _SAID.items() if part in said.lower()), said)

    def _attention(self, count: int) -> tuple[dict[int, int], list[bool]]:
        """Return the windows of sliding layers, and which layers are causal."""
        kinds = self.layer_config.get("layer_types") or ["full_attention"] * count
        known = ("full_attention", "sliding_attention")
        where = f"config.json in {self.checkpoint.folder}"
        if not isinstance(kinds, list) or len(kinds) != count or any(k not in known for k in kinds):
            raise ConfigError(f"{where}: layer_types must name {count} of {', '.join(known)}.")
        sliding = [kind == "sliding_attention" for kind in kinds]
        windows: dict[int, int] = {}
        if any(sliding):
            window = self.layer_config.get("sliding_window")
            if type(window) is not int or window < self.block_size:
                raise ConfigError(
                    f"{where}: sliding_window must be a number from block_size, "
                    f"{self.block_size}, on."
                )
            windows = {i: window for i, slides in enumerate(sliding) if slides}
        causal = self._setting("causal", self._setting("is_causal"))
        if causal is not None:
            return windows, [bool(causal)] * count
        # Without a word about it, sliding layers are causal, and the others are not.
        non_causal = bool(self._setting("sliding_window_non_causal"))
        return windows, [slides and not non_causal for slides in sliding]

    def _setting(self, key: str, default: Any = None) -> Any:
        found = block_setting(self.checkpoint.config, key)
        if found is None:
            found = self.layer_config.get(key)
        return default if found is None else found

    def _whole(self, key: str, default: int | None, least: int = 0) -> int:
        value = self._setting(key, default)
        if type(value) is not int or value < least:
            where = self.checkpoint.folder
            raise ConfigError(f"config.json in {where}: {key} must be a number from {least} on.")
        return value

    def _number(self, key: str, default: float) -> float:
        value = self._setting(key, default)
        if not isinstance(value, int | float):
            raise ConfigError(f"config.json in {self.checkpoint.folder}: {key} must be a number.")
        return float(value)
