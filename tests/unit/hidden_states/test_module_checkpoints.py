"""A draft module is read whole, or refused in one line that names its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.weight_files import INDEX
from tests.support.checkpoints.modules import FORMATS, ModuleFormat

Tensors = dict[str, Tensor]


def _file(folder: Path) -> Path:
    return sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".pt"))[-1]


def _change(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = _file(folder)
    tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    change(tensors)
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())["weight_map"]
        index = {name: file for name, file in index.items() if file != path.name}
        index |= dict.fromkeys(tensors, path.name)
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))


def _is_of_module(name: str, tensor: Tensor) -> bool:
    # Shared with the target, or the target's, or one that a format may lack.
    shared = ("embed_tokens", "lm_head", "layers.0.input_layernorm", "fc.bias")
    return tensor.is_floating_point() and not any(part in name for part in shared)


def _refused(stored: ModuleFormat, module: Path, target: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        stored.load(module, target)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("name", FORMATS)
def test_module_with_a_damaged_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    stored = FORMATS[name]
    module, target = stored.write(tmp_path)
    stored.load(module, target)
    whole = _file(module).read_bytes()
    damaged = ""

    def with_nan(tensors: Tensors) -> None:
        nonlocal damaged
        damaged = next(n for n, t in sorted(tensors.items()) if _is_of_module(n, t))
        wide = tensors[damaged].float()
        wide.view(-1)[0] = torch.nan
        tensors[damaged] = wide.to(tensors[damaged].dtype)

    _change(module, with_nan)
    said = _refused(stored, module, target)
    assert damaged in said
    assert "not finite" in said
    _file(module).write_bytes(whole)
    _change(module, lambda tensors: tensors.pop(damaged))
    _refused(stored, module, target)  # its own tests check the name
    _file(module).write_bytes(whole)
    _change(module, lambda tensors: tensors.update({damaged + "_scale": torch.ones(1)}))
    assert damaged + "_scale" in _refused(stored, module, target)
    _file(module).write_bytes(whole[:-50])
    assert _file(module).name in _refused(stored, module, target)
    _file(module).write_bytes(b"")
    assert _file(module).name in _refused(stored, module, target)
    (module / "config.json").write_text("{")
    assert "config.json cannot be read" in _refused(stored, module, target)


def test_module_in_shards_of_which_one_is_missing_is_refused_by_name(tmp_path: Path) -> None:
    stored = FORMATS["Qwen3.5's MTP layer"]
    module, target = stored.write(tmp_path)
    index = json.loads((module / INDEX).read_text())["weight_map"]
    name = next(name for name in index if name.startswith("mtp.layers"))
    wrong = next(file for file in index.values() if file != index[name])
    (module / INDEX).write_text(json.dumps({"weight_map": index | {name: wrong}}))
    assert f"{INDEX} does not say what the files hold, for {name}" in _refused(
        stored, module, target
    )
    (module / INDEX).write_text(json.dumps({"weight_map": index}))
    (module / wrong).unlink()
    assert f"lacks files that {INDEX} names: {wrong}" in _refused(stored, module, target)


def test_module_with_fewer_layers_than_counted_is_refused(tmp_path: Path) -> None:
    stored = FORMATS["DeepSeek-V3's MTP layers"]
    module, target = stored.write(tmp_path)
    fields = json.loads((module / "config.json").read_text())
    (module / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 2}))
    assert "1 of the 2 prediction modules" in _refused(stored, module, target)


def test_mlp_speculator_whose_tied_weights_differ_is_refused(tmp_path: Path) -> None:
    stored = FORMATS["MLP speculator, tied"]
    module, target = stored.write(tmp_path)
    name = "speculator.head.0.weight"
    _change(module, lambda tensors: tensors.update({f"{name}x": torch.ones(1)}))
    assert "speculator.head.0.weightx" in _refused(stored, module, target)
    _change(module, lambda tensors: tensors.pop(f"{name}x"))
    copy = "speculator.head.1.weight"
    _change(module, lambda tensors: tensors.update({copy: tensors[name] + 1}))
    assert f"{copy} is not {name}" in _refused(stored, module, target)
