"""Read a model's weights, or say in one line why not.

A checkpoint is served only if every tensor that the model needs was read, every tensor in the
files was used, and every shape is the one that config.json says.
"""

from __future__ import annotations

import re
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from outrider.errors import ConfigError
from outrider.models.weight_files import COMPUTED, PREDICTION, listed

# Towers of other modalities: only text is served.
_OTHER_MODALITIES = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision"
    r"|embed_audio|merger|mm_projector)\..*"
)
_MAX_REASON = 300  # characters of an error of transformers
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")


def read_config(folder: Path) -> Any:
    """Read config.json as transformers does. Raises `ConfigError`."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each config class checks its fields in its own way
        raise ConfigError(
            f"The config.json in {folder} cannot be read: {_one_line(error)}"
        ) from error


def read_model(
    folder: Path, config: Any, dtype: torch.dtype, tensors: dict[str, Tensor] | None = None
) -> nn.Module:
    """Read the weights of a folder that `check_folder` accepted.

    `tensors` are those of its files where they are at hand; the model keeps them on their device.
    Raises `ConfigError` that names the tensors which are missing, unused, of another shape than
    config.json says, or not finite.
    """
    model, report = _from_pretrained(folder, config, dtype, tensors)
    problems = [str(error) for error in report.get("error_msgs") or ()]
    if mismatched := report["mismatched_keys"]:
        problems.append(
            "other shapes than config.json says: "
            + listed(
                f"{name} is {list(stored)}, not {list(wanted)}"
                for name, stored, wanted in mismatched
            )
        )
    if missing := report["missing_keys"]:
        problems.append(f"tensors that the model needs are missing: {listed(missing)}")
    unused = [name for name in report["unexpected_keys"] if not _is_harmless(name, config)]
    if unused:
        problems.append(f"tensors that the model does not use: {listed(unused)}")
    if problems:
        raise ConfigError(
            f"{folder} does not hold the model of its config.json: {'; '.join(problems)}. "
            "Download it again, or correct config.json."
        )
    return model


def _from_pretrained(
    folder: Path, config: Any, dtype: torch.dtype, tensors: dict[str, Tensor] | None
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model, and what of its tensors was missing, unused or of another shape."""
    # Progress bars and reports of transformers would run through the services' own lines.
    log = transformers.utils.logging
    log.disable_progress_bar()
    verbosity = log.get_verbosity()
    log.set_verbosity(log.CRITICAL)
    try:
        source: Any = folder
        placed: dict[str, Any] = {}
        from_pretrained, fitting = AutoModelForCausalLM.from_pretrained, config
        if tensors:
            # The classes for any model take no tensors in place of a folder.
            source, from_pretrained, fitting = None, *_class_of(config)
            device = next(iter(tensors.values())).device
            placed = {"state_dict": tensors, "device_map": {"": device}}
        found: tuple[nn.Module, dict[str, Any]] = from_pretrained(
            source,
            config=fitting,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported
            **placed,
        )
        return found
    except (OSError, ValueError, KeyError, ImportError, SafetensorError, RuntimeError) as error:
        reason = _one_line(error)
        if unfit := _not_converted(error):
            reason = f"tensors are missing or of wrong shapes that make up {listed(unfit)}."
        raise ConfigError(f"The model in {folder} cannot be read: {reason}") from error
    finally:
        log.set_verbosity(verbosity)


def _class_of(config: Any) -> tuple[Callable[..., Any], Any]:
    """Return `from_pretrained` of a config's class, and the config that the class takes."""
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model_class = found[0] if isinstance(found, tuple | list) else found
    text = config.get_text_config(decoder=True)
    return model_class.from_pretrained, (text if model_class.config_class is type(text) else config)


def check_finite(model: nn.Module, folder: Path) -> None:
    """Raise `ConfigError` naming weights that hold NaN or infinity."""
    bad = [name for name, weight in model.named_parameters() if not is_finite(weight)]
    if bad:
        raise not_finite(folder, *bad)


def not_finite(folder: Path, *names: str) -> ConfigError:
    """Return the error for weights that hold NaN or infinity."""
    return ConfigError(
        f"{folder} holds weights that are not finite numbers: {listed(names)}. Download it again."
    )


def is_finite(weight: Tensor) -> bool:
    """Return whether a weight holds neither NaN nor infinity."""
    # The extremes are found in one pass, without a mask as large as the weight. NaN is both.
    return not weight.numel() or all(bool(each.isfinite()) for each in weight.aminmax())


def _is_harmless(name: str, config: Any) -> bool:
    if COMPUTED.fullmatch(name) or PREDICTION.fullmatch(name):
        return True
    text = config.get_text_config(decoder=True)
    if text is not config and _OTHER_MODALITIES.fullmatch(name):
        return True
    # Layers behind the last one are prediction modules where config.json counts them.
    layer = _LAYER.fullmatch(name)
    modules = int(getattr(text, "num_nextn_predict_layers", 0) or 0)
    first = int(text.num_hidden_layers)
    return layer is not None and first <= int(layer[1]) < first + modules


def _not_converted(error: Exception) -> list[str]:
    """Return weights that transformers could not put together, which its error does not name."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if (info := frame.f_locals.get("loading_info")) is not None:
            return list(getattr(info, "conversion_errors", ()))
    return []


def _one_line(error: Exception) -> str:
    said = textwrap.shorten(str(error), _MAX_REASON, placeholder=" ...")
    return f"transformers knows no {said}." if isinstance(error, KeyError) else said
