"""Shards of a model over two ranks on CPU say what the whole model says, token for token."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from outrider.cli.ports import free_port
from outrider.engine.batch import RowSlice, pack
from outrider.engine.model.attention_backends import attention_traits
from outrider.engine.model.loader import kv_bytes_per_page
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.model.parallel.leading_model import LeadingModel
from outrider.engine.model.parallel.ranks import RankGroup, Ranks, _dumps, _loads
from outrider.engine.model.supported_models import check_shardable
from outrider.errors import ConfigError, UnsupportedModelError
from tests.support.models import shards, slow_rank
from tests.support.models.architectures import ARCHITECTURES, VOCAB_SIZE, random_model
from tests.support.models.shards import load, say

TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
LLAMA = AutoConfig.for_model("llama", num_attention_heads=64, num_key_value_heads=8)
# Products of mixtures know no float64; OPT, GPT-2 and gpt-oss have no plan.
SHARDED = {
    "llama": "float64",
    "llama with biases": "float64",
    "qwen2": "float64",
    "qwen3": "float64",
    "mistral": "float64",
    "gemma2": "float64",
    "gemma3_text": "float64",
    "gemma4_text": "float64",
    "phi3": "float64",
    "gpt_neox": "float64",
    "cohere2": "float64",
    "mixtral": "float32",
    "qwen3_moe": "float32",
    "glm4_moe": "float32",
    "deepseek_v3": "float32",
}


def llama_with_biases() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=47,  # as the vocabulary, not a multiple of the ranks
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            attention_bias=True,
            mlp_bias=True,
        )
    )


BUILDS = {**ARCHITECTURES, "llama with biases": llama_with_biases}


def run_two(program: Callable[..., object], *args: str) -> None:
    """Two ranks run a program, in forks of a process that has imported torch."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["outrider.engine.model.loader", "outrider.engine.cpu.ops"])
    port = str(free_port())
    ranks = [forks.Process(target=_as_rank, args=(rank, port, program, args)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(100)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _as_rank(rank: int, port: str, program: Callable[..., object], args: tuple[str, ...]) -> None:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Nothing that a rank runs is deprecated.
    warnings.filterwarnings("error", message="`torch")
    code = 1
    try:
        program(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def run_torchrun(*args: str) -> None:
    """Two ranks run `shards` as torchrun starts them."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, "-m", "tests.support.models.shards", *args],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning: `torch" not in done.stderr  # nothing that a rank runs is deprecated


def said_by_two(folder: Path, run: Callable[..., None], dtype: str, *names: str) -> dict[str, Any]:
    """What two ranks say, by architecture."""
    out = folder / "said.json"
    folders = [folder / name for name in names]
    for name, path in zip(names, folders, strict=True):
        random_model(BUILDS[name], torch.float64).save_pretrained(path)  # type: ignore[operator]
    run(str(out), dtype, *map(str, folders))
    said: dict[str, Any] = json.loads(out.read_text())
    return {Path(path).name: what for path, what in said.items()}


def check(folder: Path, name: str, dtype: str, said: dict[str, Any]) -> None:
    whole = json.loads(json.dumps(say(load(folder / name, getattr(torch, dtype)))))
    assert said == whole
    assert said["drafted"] == said["plain"]
    assert len({tuple(text) for text in said["plain"]}) == len(said["plain"])
    assert said["cached"] > 0


def test_ranks_on_two_processes_generate_the_tokens_of_one(tmp_path: Path) -> None:
    # Chunked prompts, shared prefixes, drafts of which some are wrong, greedy and drawn.
    names = ("llama with biases", "gemma2")  # fused, and with transformers' modules
    said = said_by_two(tmp_path, partial(run_two, shards.main), "float64", *names)
    for name in names:
        check(tmp_path, name, "float64", said[name])


def test_ranks_when_leader_loads_longer_than_a_call_wait_for_it(tmp_path: Path) -> None:
    """Ranks of one machine choose products one after another, whoever comes first."""
    random_model(ARCHITECTURES["llama"], torch.float64).save_pretrained(tmp_path)  # type: ignore[operator]
    run_two(slow_rank.main, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_ranks_of_every_shardable_architecture_generate_the_tokens_of_one(
    name: str, tmp_path: Path
) -> None:
    dtype = SHARDED[name]
    check(tmp_path, name, dtype, said_by_two(tmp_path, run_torchrun, dtype, name)[name])


def test_ranks_from_variables_of_torchrun_are_read() -> None:
    assert Ranks.of(TORCHRUN) == Ranks(rank=3, size=4, local_rank=1)
    assert Ranks.of({}) is None
    assert Ranks.of({"WORLD_SIZE": "4"}) is None  # somebody else's
    assert Ranks.of(TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}) is None
    assert Ranks(0, 2, 0).leads
    assert Ranks(1, 2, 1).device("cpu") == torch.device("cpu")


def test_rank_without_a_device_names_the_flag() -> None:
    beyond = Ranks(rank=9, size=10, local_rank=torch.cuda.device_count())
    with pytest.raises(ConfigError, match="--nproc-per-node"):
        beyond.device("cuda")


def test_rank_group_when_rank_is_lost_before_watch_reports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name, value in (("MASTER_PORT", free_port()), ("RANK", 0), ("WORLD_SIZE", 1)):
        monkeypatch.setenv(name, str(value))
    heard: list[str] = []
    group = RankGroup(Ranks(0, 1, 0), torch.device("cpu"), start_timeout_s=60.0)
    try:
        group.lost("rank 1 is gone")
        group.watch(heard.append)
    finally:
        dist.destroy_process_group()
    assert heard == ["rank 1 is gone"]


def test_check_shardable_with_indivisible_heads_or_no_plan_refuses() -> None:
    check_shardable(LLAMA, 8)
    with pytest.raises(UnsupportedModelError, match=r"64 heads and 8 .* such as 8"):
        check_shardable(LLAMA, 3)
    with pytest.raises(UnsupportedModelError, match="gpt2 cannot be served by 2 ranks"):
        check_shardable(AutoConfig.for_model("gpt2"), 2)


@pytest.mark.parametrize(("name", "part"), [("llama", 2), ("deepseek_v3", 1)])
def test_kv_shard_of_a_rank_has_its_heads_or_all_latents(
    name: str, part: int, tmp_path: Path
) -> None:
    model: Any = ARCHITECTURES[name]()
    model.config.save_pretrained(tmp_path)
    whole, shard = (
        kv_bytes_per_page(tmp_path, dtype=torch.float32, page_size=16, num_ranks=n) for n in (1, 2)
    )
    assert whole == part * shard
    traits = attention_traits(model)
    assert traits.shard(2).num_heads * 2 == traits.num_heads
    assert traits.shard(2).num_kv_heads * 2 == traits.num_kv_heads


def test_leading_model_with_any_call_makes_it_on_all_ranks() -> None:
    calls = {name for name, what in vars(PagedModel).items() if isfunction(what)}
    leading = {name for name, what in vars(LeadingModel).items() if isfunction(what)}
    # `forward` is `logits` with another dtype. Two are for layers that run apart, and the self-test
    # of several ranks leaves windows as they are.
    own = {name for name in calls if not name.startswith("_")} - leading
    assert own == {"forward", "hidden", "head", "windows_at_most"}
    assert not LeadingModel.layered.fget(None)  # type: ignore[attr-defined]


def test_rank_message_with_a_batch_round_trips() -> None:
    rows = [RowSlice([5, 6, 7], 9, [3, 1, 2], 2), RowSlice([8], 0, [4], 1)]
    sent = pack(rows, 4, torch.device("cpu"))
    method, (batch,) = _loads(_dumps(("logits", (sent,))), torch.device("cpu"))
    assert method == "logits"
    for name in sent.__slots__:
        before, after = getattr(sent, name), getattr(batch, name)
        if isinstance(before, torch.Tensor):
            assert before.dtype == after.dtype
            assert before.tolist() == after.tolist()
        else:
            assert before == after
