"""A scorer's flags in vLLM's words."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest

from outrider.errors import ConfigError
from outrider.vllm.flags import VllmOptions, add_parallel_flags, node_rank, num_devices

OPTIONS = VllmOptions("model", "name", "bfloat16")


def test_flags_name_what_was_asked_for_and_nothing_else() -> None:
    words = OPTIONS.argv("/models/m")
    assert words[:4] == ["--model", "/models/m", "--served-model-name", "name"]
    assert "--enable-prefix-caching" in words
    assert not {"--block-size", "--max-model-len", "--kv-cache-memory-bytes"} & {*words}
    asked = replace(OPTIONS, page_size=32, kv_cache_memory=2, enable_prefix_caching=False)
    words = asked.argv("/models/m", has_tokenizer=False)
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str(2 * 2**20)
    assert {"--block-size", "--no-enable-prefix-caching", "--skip-tokenizer-init"} <= {*words}


def test_flags_in_vllms_own_words_come_last() -> None:
    assert replace(OPTIONS, more=("--enforce-eager",)).argv("m")[-1] == "--enforce-eager"


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "another"),
        ("--model=another",),
        ("--additional_config", "{}"),
        ("--additional-config.key", "1"),
        ("--worker-cls", "mine"),
    ],
)
def test_flag_that_the_scorer_goes_by_is_not_vllms_to_change(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="cannot be given after --"):
        replace(OPTIONS, num_speculative_tokens=3, more=words).argv("m")
    assert "--model" in words[0] or replace(OPTIONS, more=words).argv("m")


def test_device_that_vllm_cannot_choose_is_refused() -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=1"):
        replace(OPTIONS, device="cuda:1").argv("m")


@pytest.mark.parametrize(
    "words", [("--speculative-config", "{}"), ("--speculative_config.method", "ngram"), ("-sc", "")]
)
def test_own_speculation_is_seen_in_any_spelling(words: tuple[str, ...]) -> None:
    assert replace(OPTIONS, more=words).own_speculation
    assert not OPTIONS.own_speculation


def test_machines_after_the_first_run_vllm_without_a_server() -> None:
    flags = ("--nnodes", "2", "--node-rank", "1")
    assert (node_rank(flags), node_rank(())) == (1, 0)
    words = replace(OPTIONS, more=flags).follow_argv("/models/m")
    assert words[1:4] == ["serve", "/models/m", "--headless"]
    assert "--model" not in words
    assert words[-4:] == [*flags]


def test_devices_are_those_of_all_kinds_of_parallelism() -> None:
    flags = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "3", "--node-rank", "5")
    assert (num_devices(flags), num_devices(())) == (6, 1)
    assert num_devices((*flags, "--nnodes", "2")) == 6
    assert num_devices(("-tp=2", "-pp", "3", "--data_parallel_size", "2")) == 12


def test_proposers_are_taken_where_nothing_else_speculates() -> None:
    hosting = replace(OPTIONS, num_speculative_tokens=3, device="cpu", draft_flags=("--port", "0"))
    words = hosting.argv("m")
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert (config["method"], config["num_speculative_tokens"]) == ("custom_class", 3)
    assert words[words.index("--worker-cls") + 1] == "outrider.vllm.worker.CPUWorker"
    assert json.loads(words[words.index("--additional-config") + 1]) == {"outrider": "--port 0"}
    own = replace(hosting, more=("--speculative-config", "{}"))
    assert not own.takes_proposers
    assert "outrider.vllm.worker.CPUWorker" in own.argv("m"), "which seeded requests need"
    assert "--worker-cls" not in replace(own, device="cuda").argv("m")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data-parallel-size 2", "--data-parallel-size takes no proposers"),
        ("--data_parallel_size=2", "--data-parallel-size takes no proposers"),
        ("-dp 2", "--data-parallel-size takes no proposers"),
        ("--pipeline-parallel-size 2 --nnodes 2", "would have to dial the last stage's machine"),
        ("-pp=2 -tp 8 -n 2", "would have to dial the last stage's machine"),
    ],
)
def test_ways_to_spread_a_model_that_no_proposer_could_reach_are_refused(
    words: str, said: str
) -> None:
    more = tuple(words.split())
    hosting = replace(OPTIONS, num_speculative_tokens=3, more=more)
    with pytest.raises(ConfigError, match=said):
        hosting.argv("m")
    assert replace(hosting, num_speculative_tokens=0).argv("m")[-1] == more[-1]
    assert replace(hosting, more=(*more, "-sc", "{}")).argv("m")


@pytest.mark.parametrize(
    "words", ["-pp 2", "-tp 8 -n 2", "-dp 1 -pp 2 --nnodes=1", "-pp 2 -n 2 -n 1", "-pp"]
)
def test_ways_to_spread_a_model_that_proposers_can_reach_are_taken(words: str) -> None:
    hosting = replace(OPTIONS, num_speculative_tokens=3, more=tuple(words.split()))
    assert "--worker-cls" in hosting.argv("m")


@pytest.mark.parametrize("size", ["0", "-1", "x"])
def test_size_that_is_none_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parallel_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--tensor-parallel-size={size}"])
    assert "is not a whole number of at least 1" in capsys.readouterr().err
