"""The made-up models that are served in place of large ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks import vllm_shapes
from outrider.engines import VLLM, Wanted, choose


@pytest.mark.parametrize("shape", vllm_shapes._SHAPES)
def test_folder_of_a_shape_has_a_text_for_every_id_and_is_vllms(shape: str, tmp_path: Path) -> None:
    config = vllm_shapes._SHAPES[shape] | {"vocab_size": 9000}
    vllm_shapes._write(tmp_path, config)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 9000
    assert tokenizer.decode([8999, 8192]) == "w8999w8192"
    assert choose("auto", Wanted.of(tmp_path, on_gpu=True), installed=True) == VLLM
