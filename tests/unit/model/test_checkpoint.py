"""Checkpoints that do not hold the model of their config.json are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine.model import device_reader
from outrider.engine.model.checkpoint import check_finite, read_config, read_model
from outrider.engine.model.device_reader import DeviceReader, pinned_buffer
from outrider.errors import ConfigError
from outrider.models.weight_files import check_folder

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    return tmp_path


def _read(folder: Path, *, by_threads: bool = False) -> torch.nn.Module:
    check_folder(folder)
    config = read_config(folder)
    tensors = DeviceReader(folder, torch.device("cpu")).tensors() if by_threads else None
    model = read_model(folder, config, torch.float32, tensors)
    check_finite(model, folder)
    return model


def _change(folder: Path, change: Callable[[dict[str, Tensor]], Any], **config: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | config))


def _nothing(_: dict[str, Tensor]) -> None:
    pass


def _as_int8(tensors: dict[str, Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN].to(torch.int8)
    tensors[f"{DOWN}_scale"] = torch.ones(16)


def _nan(tensors: dict[str, Tensor]) -> None:
    tensors[DOWN][0, 0] = float("nan")


@pytest.mark.parametrize("by_threads", [False, True])
def test_checkpoint_that_is_whole_is_read(
    folder: Path, by_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_reader, "_CHUNK_BYTES", 100)  # cuts numbers apart
    tensors = check_folder(folder)
    assert tensors[DOWN].shape == (16, 16)
    model = _read(folder, by_threads=by_threads)
    stored = load_file(folder / "model.safetensors")
    for name, weight in model.named_parameters():
        assert torch.equal(weight, stored[name])


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        (lambda t: t.pop("lm_head.weight"), {}, r"missing: lm_head\.weight"),
        (lambda t: t.pop(DOWN), {}, r"missing: model\.layers\.0\.mlp\.down_proj"),
        (lambda t: t.pop("model.norm.weight"), {}, r"missing: model\.norm"),
        (_nothing, {"num_hidden_layers": 3}, r"missing: model\.layers\.2.* and 5 more"),
        (_nothing, {"num_hidden_layers": 1}, r"does not use: model\.layers\.1"),
        (lambda t: t.update(extra=torch.ones(2)), {}, "does not use: extra"),
        (_nothing, {"vocab_size": 40}, r"embed_tokens\.weight is \[32, 16\], not \[40, 16\]"),
        (_nothing, {"intermediate_size": 24}, r"shapes than config\.json says"),
        (_nothing, {"num_key_value_heads": 1}, r"k_proj\.weight is \[16, 16\], not \[8, 16\]"),
        (_nothing, {"attention_bias": True}, r"missing: .*_proj\.bias"),
        (_as_int8, {}, r"tensors of type I8.*down_proj.*--engine vllm"),
        (_nan, {}, r"not finite numbers: model\.layers\.0\.mlp\.down_proj"),
        (
            _nothing,
            {"quantization_config": {"quant_method": "gptq"}},
            r"quantised \(gptq\).*--engine vllm",
        ),
        (_nothing, {"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        (_nothing, {"model_type": "no_such_type"}, "no_such_type"),
        (_nothing, {"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_checkpoint_with_other_tensors_than_its_config_is_refused_by_name(
    folder: Path, change: Callable[[dict[str, Tensor]], Any], config: dict[str, Any], said: str
) -> None:
    _change(folder, change, **config)
    for by_threads in (False, True):
        with pytest.raises(ConfigError, match=said) as caught:
            _read(folder, by_threads=by_threads)
        assert "\n" not in caught.value.message


def test_reader_of_a_file_that_became_shorter_names_it(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = check_folder(folder)
    whole = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_reader, "check_folder", lambda _: tensors)
        path.write_bytes(whole[:-100])
        with pytest.raises(ConfigError, match=r"model\.safetensors became shorter"):
            DeviceReader(folder, torch.device("cpu")).tensors()


@pytest.mark.parametrize(
    "name", ["model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq"]
)
def test_checkpoint_with_buffers_that_are_computed_is_read(folder: Path, name: str) -> None:
    _change(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    _read(folder)


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _noise(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 1000)


def _broken_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"{}{}")


def _header(*tensors: object, size: int = 0) -> Callable[[Path], None]:
    """A file of `size` bytes behind a header of these tensors, parsed or as text."""

    def damage(folder: Path) -> None:
        fields = {str(n): tensor for n, tensor in enumerate(tensors)}
        (text,) = tensors if isinstance(tensors[0], str) else (json.dumps(fields),)
        assert isinstance(text, str)
        head = len(text).to_bytes(8, "little") + text.encode()
        (folder / "model.safetensors").write_bytes(head + bytes(size))

    return damage


def _tensor(start: float, end: int, *shape: object, dtype: str = "F32") -> object:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def _pattern(folder: Path) -> None:
    _index(folder, {"weight_map": {"lm_head.weight": "*"}})


def _parent(folder: Path) -> None:
    _index(folder, {"weight_map": {"lm_head.weight": ".."}})


def _nested(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _index(folder: Path, content: object) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def _missing_shard(folder: Path) -> None:
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    _index(folder, {"weight_map": {"a": shards[0], "b": shards[1]}})


def _no_map(folder: Path) -> None:
    _index(folder, {})


def _wrong_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _no_object(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_cut, "incomplete"),
        (_empty, "no safetensors file"),
        (_noise, "no safetensors file"),
        (_broken_header, "broken header"),
        (_header("[" * 100_000), "broken header"),
        (_header('{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}'), "broken"),
        (_header(_tensor(0, 4, -1), size=4), "broken header"),
        (_header(_tensor(0, 32, -2, -4), size=32), "broken header"),
        (_header(_tensor(0, 4, True), size=4), "broken header"),
        (_header(_tensor(0, 4, "1"), size=4), "broken header"),
        (_header(_tensor(0, 8, 2), _tensor(4, 12, 2), size=12), "broken header"),  # they overlap
        (_header(_tensor(0, 4, 1), _tensor(8, 12, 1), size=12), "broken header"),  # a hole
        (_header(_tensor(-4, 4, 2, dtype="I32"), size=4), "broken header"),
        (_header(_tensor(0, -4, 2, dtype="I32")), "broken header"),
        (_pattern, "names no safetensors files beside it"),
        (_parent, "names no safetensors files beside it"),
        (_nested, "nested too deeply"),
        (_pickle, r"pytorch_model\.bin, which is not read"),
        (_missing_shard, r"lacks files that .*: model-00002-of-00002"),
        (_no_map, "no weight_map"),
        (_wrong_json, r"config\.json cannot be read"),
        (_no_object, r"config\.json holds no JSON object"),
        (_no_config, r"no config\.json"),
    ],
)
def test_checkpoint_with_a_damaged_file_is_refused_before_weights_are_read(
    folder: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(folder)
    with pytest.raises(ConfigError, match=said) as caught:
        check_folder(folder)
    assert "\n" not in caught.value.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="pins memory where there is a device")
def test_pinned_buffer_that_cannot_be_had_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"256 MiB.*\(ulimit -l\)"):
        pinned_buffer()
