"""A small language model's folder, and every kind of folder that is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from outrider.models.weight_files import INDEX, WEIGHTS
from tests.support.checkpoints.random_checkpoints import DAMAGES
from tests.support.models.tokenizers import byte_level_bpe

VOCAB_SIZE = 320
Break = Callable[[Path], object]


@cache
def _whole() -> Path:
    torch.manual_seed(0)
    folder = Path(mkdtemp())
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    disable_progress_bar()  # tests look at what services say
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink()  # config.json decides about eos
    byte_level_bpe(VOCAB_SIZE - 2).save(str(folder / "tokenizer.json"))
    return folder


def write_whole(folder: Path) -> Path:
    """Write a Llama with a tokenizer, which is served."""
    shutil.copytree(_whole(), folder, dirs_exist_ok=True)
    return folder


def _config(**changes: Any) -> Break:
    def change(folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | changes))

    return change


def _text(name: str, text: str) -> Break:
    return lambda folder: (folder / name).write_text(text)


def _damage(name: str) -> Break:
    return lambda folder: DAMAGES[name](folder, random.Random(0))


def _replaced(*names: str, by: Mapping[str, str]) -> Break:
    def change(folder: Path) -> None:
        for path in [folder / name for name in names] if names else list(folder.iterdir()):
            path.unlink()
        for name, text in by.items():
            (folder / name).write_text(text)

    return change


def _is_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"GGUF")


def _large_tokenizer(folder: Path) -> None:
    byte_level_bpe(VOCAB_SIZE + 20).save(str(folder / "tokenizer.json"))


def _quantised(**settings: Any) -> Break:
    return _config(quantization_config=settings)


# By what is wrong. The first need no torch to be refused.
BY_FILES: Mapping[str, Break] = {
    "no such folder": shutil.rmtree,
    "an empty folder": _replaced(by={}),
    "a file, such as GGUF": _is_a_file,
    "a folder with GGUF only": _replaced(WEIGHTS, by={"model-Q4_K_M.gguf": "GGUF"}),
    "a LoRA adapter": _replaced(by={"adapter_config.json": "{}", "adapter_model.safetensors": ""}),
    "pickled weights only": _damage("pickled"),
    "no weights": _damage("no weights"),
    "config.json that is no JSON": _damage("broken config"),
    "config.json that is a list": _text("config.json", "[]"),
    "weights that are cut off": _damage("truncated file"),
    "an empty weights file": _damage("empty file"),
    "a missing shard": _damage("missing shard"),
    "an index that names wrong files": _damage("wrong index"),
    "an index without weight_map": lambda folder: (
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors"),
        (folder / INDEX).write_text("{}"),
    ),
    "GPTQ": _quantised(quant_method="gptq", bits=4),
    "AWQ": _quantised(quant_method="awq", bits=4),
    "compressed-tensors": _quantised(quant_method="compressed-tensors"),
    "bitsandbytes": _quantised(quant_method="bitsandbytes", load_in_4bit=True),
    "float8": _quantised(quant_method="fp8"),
    "GPTQ, said beside config.json": _text("quantize_config.json", '{"bits": 4}'),
    "int8 weights that are not named so": _damage("int8 weight"),
    "float8 weights that are not named so": _damage("float8 weight"),
    "a tokenizer with more tokens than the model": _large_tokenizer,
    "a tokenizer that is no JSON": _text("tokenizer.json", "{"),
    "an eos_token_id that is no number": _damage("bad eos"),
}
BY_CONFIG: Mapping[str, Break] = {
    "an unknown model_type": _damage("unknown model_type"),
    "a setting of a wrong type": _config(hidden_size="wide"),
    "an encoder": _config(model_type="bert", architectures=["BertForMaskedLM"]),
    "an encoder-decoder": _config(model_type="t5", architectures=["T5ForConditionalGeneration"]),
    "a model of images": _config(model_type="vit", architectures=["ViTModel"]),
    "attention in both directions": _config(is_causal=False),
    "chunked attention": _config(attention_chunk_size=8),
    "layers with linear attention": _config(layer_types=["linear_attention", "full_attention"]),
}
BY_WEIGHTS: Mapping[str, Break] = {
    "a missing tensor": _damage("missing tensor"),
    "a tensor under another name": _damage("renamed tensor"),
    "a tensor too many": _damage("surplus tensor"),
    "a scale that config.json does not announce": _damage("surplus scale"),
    "a tensor of another shape": _damage("misshapen tensor"),
    "a layer more in config.json": _damage("one layer more"),
    "another vocab_size in config.json": _config(vocab_size=VOCAB_SIZE + 1),
    "a weight that is not a number": _damage("not a number"),
}
