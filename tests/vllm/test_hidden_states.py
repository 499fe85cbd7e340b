"""Remote heads draft from vLLM's hidden states, which are those of the target by itself."""

from __future__ import annotations

from collections.abc import Iterator
from subprocess import Popen
from typing import Any

import pytest
import torch

from outrider.errors import ConfigError
from outrider.types import StepEvents
from outrider.vllm import adapter
from tests.support.services.vllm_ahead import let_cpu_schedule_ahead
from tests.vllm.conftest import PLUGIN, TARGET, Engine
from tests.vllm.test_ahead import LONG, core_of
from tests.vllm.test_texts import GREEDY, KINDS, PROMPTS, during

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

FLAGS = "--port 0 --data-port 0 --speculation-policy fixed --hidden-features 2,4,5,7,final"
STORY = "Once there was a little dog who liked to run in the park with a red ball. " * 12
Texts = dict[str, list[tuple[int, ...]]]
KEPT: list[Engine] = []
"""An engine that is collected ends what all engines of a process share."""


@pytest.fixture(scope="module", params=[False, True], ids=["in turns", "ahead"])
def states(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine that keeps states, with pages for a part of 16 long texts."""
    from outrider.vllm.ahead_config import allow

    settings: dict[str, Any] = {"block_size": 32, "num_gpu_blocks_override": 64}
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            let_cpu_schedule_ahead(patch)
            allow()
            settings["async_scheduling"] = True
        engine = Engine(additional_config={"outrider": FLAGS}, **settings)
        KEPT.append(engine)
        yield engine


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Texts:
    """Texts of an engine that keeps no states, without drafts."""
    texts = {kind: engine.texts(PROMPTS, **params) for kind, params in KINDS.items()}
    return {
        **texts,
        "long": engine.texts(PROMPTS, **LONG),
        "story": engine.texts([STORY], **GREEDY),
    }


def host_of(engine: Engine) -> Any:
    return core_of(engine).model_executor.driver_worker.worker.model_runner.drafter._host


def cached_tokens(engine: Engine, prompt: str) -> int:
    """Return how many of a prompt's tokens vLLM finds in its cache."""
    from vllm import SamplingParams

    [output] = engine.llm.generate([prompt], SamplingParams(max_tokens=4), use_tqdm=False)
    return int(output.num_cached_tokens)


class Sent:
    """The rows and the texts of all sessions that had any, as they leave the stepping thread."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.rows: dict[int, list[Any]] = {}
        self.texts: dict[int, list[int]] = {}
        self._host = host_of(engine)
        self._stepped = self._host.listener.stepped
        patch.setattr(self._host.listener, "stepped", self.stepped)

    def stepped(self, events: StepEvents) -> None:
        for rows in events.features.rows if events.features else ():
            self.rows.setdefault(rows.session_id, []).append(
                (rows.start, rows.order, bytes(rows.rows))
            )
        for commit in events.commits:
            if (row := self._host._by_session.get(commit.session_id)) is not None:
                self.texts[commit.session_id] = list(row.token_ids)
        self._stepped(events)

    def check(self, projections: dict[bytes, torch.Tensor]) -> int:
        """Compare all rows with a forward of `transformers`; return how many there were."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
        caught: list[torch.Tensor] = []  # what enters each layer
        for layer in model.model.layers:
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: caught.append((args or [kwargs["hidden_states"]])[0][0]),
                with_kwargs=True,
            )
        total = 0
        for session_id, parts in self.rows.items():
            caught.clear()
            with torch.inference_mode():
                final = model.model(torch.tensor([self.texts[session_id]])).last_hidden_state[0]
            expected_at = 0
            for start, order, data in parts:
                spec = order.spec
                assert start == expected_at, "in order, without gaps"
                got = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(-1, spec.width)
                kept = [caught[i] for i in spec.layers] + ([final] if spec.final_norm else [])
                expected = torch.cat(kept, 1)[start : start + len(got)].to(torch.bfloat16)
                if spec.projection_dim:
                    matrix = projections[spec.projection_sha256]
                    expected = torch.nn.functional.linear(expected, matrix)
                scale = expected.float().norm(dim=1)
                error = (got.float() - expected.float()).norm(dim=1) / scale
                assert error.max() < 0.03, (session_id, start, int(error.argmax()))
                expected_at += len(got)
                total += len(got)
        return total


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_rows_are_the_targets_states_of_committed_tokens(
    method: str, states: Engine, plain: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a prompt computed in parts, of one from the prefix cache, and of preempted texts."""
    preempted = []
    scheduler = core_of(states).scheduler
    preempt = scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    with states.proposer("--method", method):
        sent = Sent(states, monkeypatch)
        for _ in range(2):
            assert states.texts([STORY], **GREEDY) == plain["story"]
        assert cached_tokens(states, STORY) >= 32
        assert states.texts(PROMPTS, **LONG) == plain["long"]
        assert states.texts(PROMPTS, **KINDS["sampled"]) == plain["sampled"]
        projections = host_of(states)._states._streams._projections
        number = sent.check(dict(projections))
    assert preempted
    first, second, *_ = sorted(sent.rows)
    prompt = len(sent.texts[first]) - 40
    assert sum(len(data) // order.spec.row_bytes for _, order, data in sent.rows[first]) > prompt
    assert sent.rows[second][0][0] == 0, "from the first position on, cached or not"
    assert number > 16 * 100


@pytest.mark.parametrize("method", ["eagle3", "dspark", "mtp", "medusa", "mlp_speculator"])
def test_texts_are_the_same_with_remote_heads(method: str, states: Engine, plain: Texts) -> None:
    states.drafted()
    with states.proposer("--method", method):
        for kind, params in KINDS.items():
            assert states.texts(PROMPTS, **params) == plain[kind], kind
        drafted, accepted = states.drafted()
        assert accepted > drafted / 10 > 0


def test_head_killed_and_restarted_fails_no_request_and_drafts_again(
    states: Engine, plain: Texts
) -> None:
    """One that begins while requests run has their states from the first position on."""
    with states.proposer("--method", "eagle3") as first:
        assert during(Popen.kill, first, lambda: states.texts(PROMPTS, **LONG)) == plain["long"]
    states.drafted()
    with states.proposer("--method", "eagle3"):
        assert states.texts(PROMPTS, **GREEDY) == plain["greedy"]
        drafted, accepted = states.drafted()
        assert accepted > drafted / 2 > 0


def test_pool_shares_the_memory_of_keys_and_values(states: Engine) -> None:
    pool = host_of(states)._states._streams._pool
    assert len(pool.rows) == 64 * 32
    worker = core_of(states).model_executor.driver_worker.worker
    pages, page_size = adapter.page_of(worker.model_runner)
    left = worker.determine_available_memory()
    assert left + left // pages * page_size * pool.bytes_per_slot <= 256 << 20
    assert left > 64 << 20


def config_of(flags: str, **given: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    from outrider.vllm.proposer import RemoteProposer

    args = EngineArgs(
        str(TARGET), dtype="float32", speculative_config=PLUGIN,
        additional_config={"outrider": flags}, **given,
    )  # fmt: skip
    return RemoteProposer(args.create_engine_config())


def test_what_keeps_no_states_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="none of 'final', 'eagle3'"):
        config_of("--hidden-features 99")
    with pytest.raises(ConfigError, match="--hidden-features 0: without compilation"):
        config_of("--hidden-features 0,2", enforce_eager=True)
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    with pytest.raises(ConfigError, match="--kv-transfer-config brings has keys and values only"):
        config_of("--hidden-features final", kv_transfer_config=transfer)
