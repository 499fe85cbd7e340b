"""Find the target's layers that a checkpoint reads. The command line asks, so no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.methods import BLOCK_METHODS
from outrider.models.files import read_json
from outrider.models.resolve import EMBEDDED, find_local, resolve_model

KEY = "eagle_aux_hidden_state_layer_ids"
OUTPUT_KEY, INPUT_KEY = "target_layer_ids", "aux_hidden_state_layer_ids"
LAYER_METHODS = frozenset({"eagle3", *BLOCK_METHODS})
"""Methods that read states between layers; others read the one after the final norm."""
SHALLOW = 24  # a target with fewer layers: its third from last leaves out an eighth and more


def default_layers(count: int) -> tuple[int, int, int]:
    """Return the layers, of `count`, that a checkpoint reads which names none, as EAGLE-3's own.

    Li et al. 2025, arXiv 2503.01840.
    """
    return 2, count // 2, count - 3


def trained_layers(count: int) -> tuple[int, int, int]:
    """Return the layers, of `count`, that `outrider train` uses and names in config.json.

    The last default layer of a shallow target would leave out much of its work (3 layers of 8), so
    the input of its last layer is read instead.
    """
    low, middle, high = default_layers(count)
    return low, middle, count - 1 if count < SHALLOW else high


def spread_layers(count: int) -> tuple[int, ...]:
    """Return four states, spread up to the input of the last of `count` layers.

    Not up to its output: `transformers` gives that behind the final norm, a scorer before it.
    """
    first, last = min(2, count - 1), count - 1
    return tuple(sorted({first + round(i * (last - first) / 3) for i in range(4)}))


def states_read(method: str, module: str | None) -> str:
    """Return the `--hidden-features` that a scorer needs for a module.

    None or "embedded" is the module that ships with Outrider. A module on disk names its layers in
    config.json, which of a block drafter is downloaded. Raises `ConfigError`.
    """
    if method not in LAYER_METHODS:
        return "final"
    if module is None or module == EMBEDDED:
        folder = resolve_model(None, method)
    else:
        folder = Path(module).expanduser()
    if method in ("dspark", "dflash"):
        if module is not None and find_local(module, method) is None:
            folder = resolve_model(module, method, tokenizer_only=True)
        config = read_json(folder / "config.json")
        return ",".join(map(str, block_layers(config, str(folder))))
    layers = aux_layers(read_json(folder / "config.json"))  # no file: it is to be downloaded
    return "eagle3" if layers is None else ",".join(map(str, layers))


def aux_layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the decoder layers, from 0, whose inputs a config.json names; None: it names none.

    Files number layers by their inputs (`speculators`, and most others) or by the outputs of the
    layers before (ModelOpt: 1, N/2 - 1, N - 4). Only the first number tells: 1 is an output's, for
    what enters layer 1 is nearly the embedding. Raises `ConfigError`.
    """
    nested = config.get("eagle_config")
    given = config.get(KEY, nested.get(KEY) if isinstance(nested, dict) else None)
    if given is None:
        return None
    outputs = _rising(given, KEY)[0] == 1 and "speculators_model_type" not in config
    layers = tuple(i + outputs for i in given)
    if layers[0] < 0:
        raise ConfigError(f"{KEY} in config.json must not be below 0, unlike {given}.")
    return layers


def block_layers(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Return the states that a block drafter's config.json names, as `FeatureSpec` numbers them.

    `target_layer_ids` (DFlash, DeepSpec) count layers by their outputs, from -1 for the embedding;
    `aux_hidden_state_layer_ids` (`speculators`) by their inputs. Raises `ConfigError`, also if
    there are neither: `where` says of which checkpoint.
    """
    for key, shift in ((OUTPUT_KEY, 1), (INPUT_KEY, 0)):
        given = block_setting(config, key)
        if given is not None:
            layers = tuple(i + shift for i in _rising(given, key))
            if layers[0] < 0:
                raise ConfigError(f"{key} in config.json begins at {given[0]}, before any layer.")
            return layers
    raise ConfigError(
        f"config.json of {where} names no layers of the target ({OUTPUT_KEY} or {INPUT_KEY})."
    )


def block_setting(config: Mapping[str, Any], key: str) -> Any:
    """Return a block drafter's setting, which may be in a group of its own."""
    group = config.get("dflash_config")
    return group[key] if isinstance(group, dict) and key in group else config.get(key)


def _rising(given: Any, key: str) -> list[int]:
    if not isinstance(given, list) or not given or not all(type(i) is int for i in given):
        raise ConfigError(f"{key} in config.json must list layer numbers.")
    if given != sorted(set(given)):
        raise ConfigError(f"{key} in config.json must rise, unlike {given}.")
    return given
