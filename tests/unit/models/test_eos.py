"""Which ids end a text, against what transformers loads from the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider.errors import ConfigError
from outrider.models.eos import read_eos_token_ids

ABSENT = object()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    path = tmp_path_factory.mktemp("eos")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def _write(path: Path, eos: object) -> None:
    fields = json.loads(path.read_text()) if path.exists() else {}
    fields.pop("eos_token_id", None)
    path.write_text(json.dumps(fields if eos is ABSENT else fields | {"eos_token_id": eos}))


@pytest.mark.parametrize("in_config", [ABSENT, None, 7, [7, 8]])
@pytest.mark.parametrize("in_generation", ["no file", ABSENT, None, 5, [5, 9]])
def test_eos_in_any_files_is_what_transformers_stops_at(
    folder: Path, in_config: object, in_generation: object
) -> None:
    _write(folder / "config.json", in_config)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if in_generation != "no file":
        _write(folder / "generation_config.json", in_generation)
    if in_config is ABSENT and in_generation == "no file":
        assert not read_eos_token_ids(folder), "a default of a config's class is no file's word"
        return
    model = AutoModelForCausalLM.from_pretrained(folder)
    eos = model.generation_config.eos_token_id
    expected = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
    assert read_eos_token_ids(folder) == expected


def test_eos_of_a_nested_text_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 3}}))
    assert read_eos_token_ids(tmp_path) == {3}


@pytest.mark.parametrize("eos", ["</s>", [1, "x"], -1, True, 1.5])
def test_eos_that_is_no_token_id_is_refused(tmp_path: Path, eos: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ConfigError, match="no token id"):
        read_eos_token_ids(tmp_path)
