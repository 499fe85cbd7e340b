"""`LLM`'s arguments with vLLM as the engine."""

from __future__ import annotations

from typing import Any

import pytest

from outrider import engines
from outrider.errors import ConfigError
from outrider.offline.arguments import Arguments, scorer_options
from scorer_service.__main__ import resolve


@pytest.fixture(autouse=True)
def vllm_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda _: object())


def test_further_arguments_become_vllms_flags() -> None:
    given = Arguments(
        model="embedded",
        device="cpu",
        engine="vllm",
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    options = scorer_options(given, {"enforce_eager": True, "swap_space": None, "load_format": "x"})
    assert (options.engine, options.num_speculative_tokens) == ("vllm", 0)
    assert options.vllm_flags[:3] == ("--enforce-eager", "--load-format", "x")
    assert options.vllm_flags[3] == "--speculative-config"
    assert (options.max_num_batched_tokens, options.page_size) == (0, 0)
    assert not options.for_vllm().takes_proposers


@pytest.mark.parametrize(
    ("others", "engine"),
    [
        ({}, "native"),
        ({"tensor_parallel_size": 2}, "vllm"),
        ({"quantization": "awq"}, "vllm"),
        ({"quantization": "fp8"}, "native"),
    ],
)
def test_auto_takes_what_the_table_says(others: dict[str, object], engine: str) -> None:
    others = dict(others)
    asked: Any = others.pop("quantization", None)
    options = scorer_options(Arguments(model="embedded", device="cpu", quantization=asked), others)
    assert options.engine == engine
    passed = options.vllm_flags[-1] if asked and engine == "vllm" else options.quantization
    assert passed == asked


@pytest.mark.parametrize(("asked", "passed"), [("auto", ()), ("fp8", ("--kv-cache-dtype", "fp8"))])
def test_dtype_of_the_cache_is_passed_to_vllm(asked: str, passed: tuple[str, ...]) -> None:
    given = Arguments(model="embedded", device="cpu", engine="vllm", kv_cache_dtype=asked)
    options = scorer_options(given)
    assert options.vllm_flags == passed
    scorer = resolve(["--engine", "vllm", "--kv-cache-dtype", asked, "--", "--seed", "1"])
    assert scorer["vllm_flags"] == (*passed, "--seed", "1")
    assert scorer_options(Arguments(model="embedded", kv_cache_dtype="fp8")).kv_cache_dtype == "fp8"


def test_kernels_of_attention_are_vllms_own() -> None:
    given = Arguments(model="embedded", device="cpu", engine="vllm", attention_backend="FLASH_ATTN")
    assert scorer_options(given).vllm_flags == ("--attention-backend", "FLASH_ATTN")


def test_engine_of_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="engine='sglang' must be one of auto, native, vllm"):
        scorer_options(Arguments(model="embedded", engine="sglang"))
