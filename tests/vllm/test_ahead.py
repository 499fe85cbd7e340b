"""`--async-scheduling`: the same texts where steps are scheduled before the last one's tokens."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.vllm import versions
from tests.support.services.vllm_ahead import Done, let_cpu_schedule_ahead
from tests.vllm.conftest import PLUGIN, TARGET, Engine
from tests.vllm.test_texts import GREEDY, KINDS, PENALIZED, PROMPTS, SAMPLED, during

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

LONG = {**SAMPLED, "max_tokens": 160, "ignore_eos": True}
Texts = list[tuple[int, ...]]
KEPT: list[Engine] = []
"""An engine that is collected ends what all engines of a process share."""


@pytest.fixture(scope="module")
def ahead() -> Iterator[Engine]:
    """An engine that schedules ahead, with pages for a part of 16 long texts."""
    from outrider.vllm.ahead_config import allow

    with pytest.MonkeyPatch.context() as patch:
        let_cpu_schedule_ahead(patch)
        allow()
        engine = Engine(async_scheduling=True, block_size=32, num_gpu_blocks_override=64)
        KEPT.append(engine)
        assert core_of(engine).batch_queue_size == 2
        yield engine


def core_of(engine: Engine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core


def host_of(engine: Engine) -> Any:
    return core_of(engine).model_executor.driver_worker.worker.model_runner.drafter._host


def mixed() -> list[dict[str, Any]]:
    """Kinds side by side: two grammars, an early end, a late one, penalties, a stop string."""
    from vllm.sampling_params import StructuredOutputsParams

    dates = {"structured_outputs": StructuredOutputsParams(regex="[0-9]{4}-[0-9]{2}-[0-9]{2}")}
    words = {"structured_outputs": StructuredOutputsParams(regex="(the|a) [a-z]{3,12}( [a-z]+){6}")}
    kinds = [
        {**GREEDY, **dates}, {**SAMPLED, **words}, {**SAMPLED, "stop": ["."]},
        {**GREEDY, **words}, {**PENALIZED, "repetition_penalty": 1.2}, {**SAMPLED, **dates},
        {**SAMPLED, "max_tokens": 9}, GREEDY,
    ]  # fmt: skip
    return kinds * 2


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[str, Texts]:
    """Texts of steps one after the other, without drafts."""
    texts = {kind: engine.texts(PROMPTS, **params) for kind, params in KINDS.items()}
    return {
        **texts,
        "mixed": engine.answers(PROMPTS, mixed()),
        "long": engine.texts(PROMPTS, **LONG),
    }


@pytest.mark.parametrize("late", [0, 2], ids=["read before the launch", "read after the launch"])
@pytest.mark.parametrize("method", [None, "suffix", "ngram", "draft_model"])
def test_steps_ahead_emit_the_texts_of_steps_one_after_the_other(
    method: str | None,
    late: int,
    ahead: Engine,
    plain: dict[str, Texts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    host = host_of(ahead)
    choose = host.chosen
    monkeypatch.setattr(host, "chosen", lambda n: (chosen.append(sum(n.values())), choose(n)))
    monkeypatch.setattr(Done, "late", late)

    def check() -> None:
        for kind, params in KINDS.items():
            assert ahead.texts(PROMPTS, **params) == plain[kind], kind
        assert ahead.answers(PROMPTS, mixed()) == plain["mixed"]

    if method is None:
        check()
        assert ahead.drafted() == (0, 0)
        assert chosen, "steps without room for drafts wait for no host"
        assert not any(chosen)
        return
    with ahead.proposer("--method", method, "--max-branches", "8"):
        check()
        drafted, accepted = ahead.drafted()
        assert bool(late) or not any(chosen)
        assert sum(chosen) > 0 or not late or method == "ngram"  # few rows have its branches
        assert accepted > (drafted / 5 if method == "draft_model" else 0)


@pytest.mark.usefixtures("ahead")
def test_model_that_is_given_embeddings_reads_each_token(engine: Engine) -> None:
    ours = Engine(async_scheduling=True, enable_prompt_embeds=True, max_num_seqs=10)
    KEPT.append(ours)
    params = [{**GREEDY, "max_tokens": 4 + 7 * i % 60} for i in range(3 * len(PROMPTS))]
    assert ours.answers(3 * PROMPTS, params) == engine.answers(3 * PROMPTS, params)


def test_preempted_texts_go_on_ahead(
    ahead: Engine, plain: dict[str, Texts], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, preempted = core_of(ahead).scheduler, []
    preempt = scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    with ahead.proposer("--method", "draft_model"):
        assert ahead.texts(PROMPTS, **LONG) == plain["long"]
        assert ahead.drafted()[1] > 0
    assert preempted


def test_proposer_killed_and_hung_costs_no_text_ahead(
    ahead: Engine, plain: dict[str, Texts]
) -> None:
    def hung(process: Any) -> None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        process.send_signal(signal.SIGCONT)

    with ahead.proposer("--method", "draft_model") as process:
        for act in (hung, Popen.kill):
            assert during(act, process, lambda: ahead.texts(PROMPTS, **LONG)) == plain["long"]


def test_fault_of_the_draft_side_costs_drafts_only_ahead(
    ahead: Engine, plain: dict[str, Texts], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_of(ahead)
    commit, calls = host.commit, []

    def fail_at_times(*args: Any) -> None:
        calls.append(args)
        if len(calls) in (5, 9):
            raise RuntimeError("the draft side failed")
        commit(*args)

    with ahead.proposer("--method", "draft_model"):
        monkeypatch.setattr(host, "commit", fail_at_times)
        assert ahead.texts(PROMPTS, **KINDS["sampled"]) == plain["sampled"]
        assert len(calls) > 9
        drafted, accepted = ahead.drafted()
        assert accepted > drafted / 5 > 0, "its proposer was told the texts again"


def test_aborted_requests_leave_the_others_texts_alone_ahead(
    ahead: Engine, plain: dict[str, Texts]
) -> None:
    from vllm import SamplingParams

    llm = ahead.llm.llm_engine
    with ahead.proposer("--method", "draft_model"):
        for name in ("first", "again"):  # a name may come back while its last step runs
            for i, prompt in enumerate(PROMPTS):
                llm.add_request(f"{i}", prompt, SamplingParams(seed=i, **SAMPLED))
            texts, steps = {}, 0
            while llm.has_unfinished_requests():
                for output in llm.step():
                    if output.finished:
                        texts[int(output.request_id)] = tuple(output.outputs[0].token_ids)
                steps += 1
                if steps == 4:
                    llm.abort_request([f"{i}" for i in range(0, 16, 3)])
            expected = {i: plain["sampled"][i] for i in range(16) if i % 3}
            assert {i: text for i, text in texts.items() if i % 3} == expected, name


@pytest.mark.parametrize("at", [5, 8, 11])
def test_least_length_is_that_of_steps_one_after_the_other(
    at: int, ahead: Engine, engine: Engine
) -> None:
    """The end comes no token earlier, and none later, than without drafts."""
    free = engine.texts(PROMPTS, **GREEDY)
    params = [
        {**GREEDY, "stop_token_ids": [text[at % len(text)]], "min_tokens": at} for text in free
    ]
    expected = engine.answers(PROMPTS, params)
    with ahead.proposer("--method", "draft_model"):
        assert ahead.answers(PROMPTS, params) == expected
    assert ahead.drafted()[1] > 0
    with engine.proposer("--method", "draft_model"):
        assert engine.answers(PROMPTS, params) == expected
    assert engine.answers(PROMPTS, params) == expected  # after which the drafted ones are counted
    assert engine.drafted()[1] > 0


def config_of(**given: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    given = {"async_scheduling": True, "speculative_config": PLUGIN, **given}
    return EngineArgs(str(TARGET), dtype="float32", **given).create_engine_config()


@pytest.mark.usefixtures("ahead")
def test_flags_that_cannot_be_scheduled_ahead_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="--pipeline-parallel-size"):
        config_of(pipeline_parallel_size=2)
    with pytest.raises(Exception, match="async scheduling is only supported"):
        config_of(speculative_config={**PLUGIN, "model": "collections.OrderedDict"})
    monkeypatch.setitem(versions.AHEAD.fields, "vllm.config:VllmConfig", ("another_name",))
    with pytest.raises(ConfigError, match=r"lacks vllm.config:VllmConfig.another_name\."):
        config_of()


def test_package_names_what_vllm_calls_in_its_processes() -> None:
    from outrider.vllm.ahead_config import allow

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    group = "vllm.general_plugins"
    [(name, value)] = project["entry-points"][group].items()
    assert EntryPoint(name, value, group).load() is allow


@pytest.mark.usefixtures("ahead")
def test_without_the_flag_vllm_decides_as_before() -> None:
    for flag in (None, False):
        config = config_of(async_scheduling=flag)
        assert config.scheduler_config.async_scheduling is False
        assert type(config).__name__ == "VllmConfig"


@pytest.mark.usefixtures("ahead")
def test_steps_with_prompts_are_captured_whole_where_vllm_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With other flags, models or attention, vLLM's own choice stands."""
    from vllm.config import CompilationConfig, ModelConfig, ParallelConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backend import AttentionCGSupport

    from outrider.vllm import ahead_config

    config = config_of(max_num_batched_tokens=700, max_num_seqs=16)
    assert type(config.compilation_config) is CompilationConfig  # this device has no graphs

    def chosen(
        support: str, *, ours: bool = True, by_default: str = "FULL_AND_PIECEWISE", **flags: Any
    ) -> tuple[Any, ...]:
        graphs = {"cudagraph_mode": by_default, "cudagraph_capture_sizes": [1, 2, 4, 8]}
        made = CompilationConfig(mode=3, max_cudagraph_capture_size=8, **graphs)
        made.set_splitting_ops_for_v1("naive")
        config.compilation_config = made
        if ours:
            ahead_config._capture_whole(EngineArgs(str(TARGET), **flags), config)
        made = pickle.loads(pickle.dumps(config)).compilation_config  # as for a worker
        for _ in range(2):  # vLLM asks when it measures memory, too
            mode = made.resolve_cudagraph_mode_and_sizes(AttentionCGSupport[support], "its name", 5)
        sizes = made.cudagraph_capture_sizes
        assert sizes[-1] == made.max_cudagraph_capture_size
        return mode.name, sizes[:2], sizes[-1]

    assert chosen("ALWAYS")[0] == "FULL_AND_PIECEWISE"
    monkeypatch.setattr(ahead_config.current_platform, "is_cuda", lambda: True)
    assert chosen("ALWAYS") == ("FULL", [5, 10], 640)
    for support in AttentionCGSupport.__members__:
        if support != "ALWAYS":
            assert chosen(support) == chosen(support, ours=False)
    assert chosen("UNIFORM_BATCH") == ("FULL_AND_PIECEWISE", [5], 5)
    assert chosen("NEVER")[0] == "PIECEWISE"  # vLLM refuses to start with whole steps

    assert chosen("ALWAYS", by_default="PIECEWISE")[0] == "PIECEWISE"  # as with -O1
    with monkeypatch.context() as patch:
        asked: list[Any] = []
        patch.setattr(ahead_config, "_capture_whole", lambda _, config: asked.append(config))
        made = config_of()
        assert [each is made for each in asked] == [True]

    own = chosen("ALWAYS", ours=False)
    for name, value in [
        *(("cudagraph_mode", "FULL_AND_PIECEWISE"), ("compile_sizes", [4])),
        *(("cudagraph_capture_sizes", [8]), ("max_cudagraph_capture_size", 8)),
    ]:
        assert chosen("ALWAYS", compilation_config={name: value}) == own
    assert chosen("ALWAYS", cudagraph_capture_sizes=[8]) == own
    assert chosen("ALWAYS", max_cudagraph_capture_size=8) == own
    for owner, name in [
        *((ModelConfig, "use_mla"), (ModelConfig, "is_multimodal_model")),
        (ParallelConfig, "use_ubatching"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, True)
            assert chosen("ALWAYS") == own, name
    for most, expected in [(600, ("FULL", [5, 10], 515)), (7, own)]:  # tokens of a text
        monkeypatch.setattr(config.model_config, "max_model_len", most)
        assert chosen("ALWAYS") == expected
    monkeypatch.setattr(config.model_config, "max_model_len", 700)
    config.cache_config.kv_sharing_fast_prefill = True
    assert chosen("ALWAYS") == own


@pytest.mark.usefixtures("ahead")
def test_configuration_passes_vllms_check_in_another_process(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_bytes(pickle.dumps(config_of()))
    code = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb')).__post_init__()"
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, timeout=200)
