"""Find the target's layers that an EAGLE-3 checkpoint reads. The command line asks, so no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.models.files import read_json
from outrider.models.resolve import EMBEDDED, resolve_model

KEY = "eagle_aux_hidden_state_layer_ids"
SHALLOW = 24  # a target with fewer layers: its third from last leaves out an eighth and more


def default_layers(count: int) -> tuple[int, int, int]:
    """Those of `count` that a checkpoint reads which names none, as EAGLE-3's own code does.

    Li et al. 2025, arXiv 2503.01840.
    """
    return 2, count // 2, count - 3


def trained_layers(count: int) -> tuple[int, int, int]:
    """Those of `count` that a module is trained on here; its config.json names them.

    Of a shallow target the default's last would leave out much of what it computed (3 layers of
    8); what enters the last layer is there for every reader.
    """
    low, middle, high = default_layers(count)
    return low, middle, count - 1 if count < SHALLOW else high


def states_read(method: str, module: str | None) -> str:
    """Return the `--hidden-features` that a scorer needs for a module.

    None or "embedded" is the module that ships with Outrider. An EAGLE-3 module on disk names its
    layers in config.json. Raises `ConfigError`.
    """
    if method != "eagle3":
        return "final"
    if module is None or module == EMBEDDED:
        folder = resolve_model(None, method)
    else:
        folder = Path(module).expanduser()
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
    if not isinstance(given, list) or not given or not all(type(i) is int for i in given):
        raise ConfigError(f"{KEY} in config.json must list layer numbers.")
    outputs = given[0] == 1 and "speculators_model_type" not in config
    layers = tuple(i + outputs for i in given)
    if layers[0] < 0 or list(layers) != sorted(set(layers)):
        raise ConfigError(f"{KEY} in config.json must rise from 0 or more, unlike {given}.")
    return layers
