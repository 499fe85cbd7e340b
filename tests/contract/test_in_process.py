"""A scorer that drafts in its own process: text never depends on it, whatever its method does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc
import pytest
from torch import Tensor

from outrider.draft_port import PostedBlock
from outrider.draft_tree import DraftTree
from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.hybrid import HybridProposer
from outrider.drafting.proposer import (
    NO_PACE,
    DraftRound,
    Pace,
    Proposer,
    ProposerLimits,
    SessionKey,
    SessionStart,
)
from outrider.engine.batch import PackedBatch
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.features import FeatureSpec
from outrider.policy.base import FixedPolicy
from outrider.policy.row import Drafting
from outrider.v1 import common_pb2
from tests.support.models.features import CAPTURED, SIZE, RowReader, selection
from tests.support.models.hash_model import HashModel
from tests.support.services.guessing import guessing
from tests.support.services.reader_service import serving
from tests.support.services.scorer import (
    MAX_LEN,
    VOCAB,
    Output,
    PacedModel,
    RunningScorer,
    generate_request,
    running_scorer,
)
from tests.support.services.scripted_proposer import proposing

FINAL = FeatureSpec(SIZE, (), final_norm=True)
PROMPTS = [[(7 * i + j) % VOCAB for j in range(3 + 14 * i)] for i in range(6)]


def draft_model(_model: PacedModel, **limits: int) -> DraftModelProposer:
    """The target itself, in other pages."""
    model = HashModel(VOCAB, num_pages=512, max_model_len=MAX_LEN)
    return DraftModelProposer(model, name="hash", limits=ProposerLimits(max_branches=0, **limits))


def ngram(_model: PacedModel) -> NgramProposer:
    return NgramProposer(prompt_lookup_min=1, max_branches=0)


def reads(spec: FeatureSpec = FINAL) -> Callable[[PacedModel], RowReader]:
    """Drafts from hidden states, of which it checks each; every third draft ends wrong."""
    matrix = None
    if spec.projection_dim:
        spec, matrix = selection(CAPTURED, spec.projection_dim)

    def made(model: PacedModel) -> RowReader:
        def make_draft(tokens: Sequence[int], k: int) -> DraftTree:
            text = model.greedy_text(tokens, k)
            if len(tokens) % 3 == 0 and k:
                text[-1] = (text[-1] + 1) % VOCAB
            return DraftTree.chain(len(tokens), text)

        return RowReader(spec, make_draft, vocab_size=VOCAB, projection=matrix)

    return made


class Kept:
    """Makes a method and keeps it for the test to look at."""

    def __init__(self, make: Callable[[PacedModel], Proposer]) -> None:
        self._make = make

    def __call__(self, model: PacedModel) -> Proposer:
        self.method = self._make(model)
        return self.method


@pytest.mark.parametrize(
    "make", [draft_model, lambda model: reads()(model)], ids=["model", "eagle"]
)
async def test_drafts_that_a_request_asks_for_are_what_its_kinds_tell(
    make: Callable[[PacedModel], Proposer],
) -> None:
    async with running_scorer(in_process=make, features=CAPTURED) as scorer:
        request = generate_request(PROMPTS[1])
        assert not [r async for r in scorer.stub.Generate(request) if r.drafts]
        request.draft_trees = True
        responses = [response async for response in scorer.stub.Generate(request)]
    text = [*request.prompt_token_ids, *(t for r in responses for t in r.token_ids)]
    kinds = [kind for response in responses for kind in response.kinds]
    drafts = [draft for response in responses for draft in response.drafts]
    told = [0] * len(kinds)  # tokens of a draft that the text went along
    for draft in drafts:
        assert list(draft.parents) in ([], list(range(-1, len(draft.token_ids) - 1)))
        for at, token in enumerate(draft.token_ids, draft.base_len):
            if at >= len(text) or text[at] != token:
                break
            told[at - len(request.prompt_token_ids)] = 1
    accepted = [int(kind == common_pb2.TOKEN_KIND_ACCEPTED) for kind in kinds]
    assert accepted == told
    info = responses[-1].aux_info
    assert len(drafts) == sum(info.k_histogram[1:])
    assert sum(accepted) == info.accepted > 0


async def generate_all(scorer: RunningScorer, **how: float) -> list[Output]:
    jobs = [scorer.generate(prompt, max_tokens=40, **how) for prompt in PROMPTS]  # type: ignore[arg-type]
    return list(await asyncio.gather(*jobs))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("draft_model", draft_model),
        ("ngram", ngram),
        ("eagle", reads()),
        ("eagle", reads(FeatureSpec(SIZE, (), projection_dim=3))),
        ("both", lambda model: HybridProposer([ngram(model), draft_model(model)])),
    ],
    ids=["draft model", "ngram", "hidden states", "projected", "two methods"],
)
async def test_in_process_proposer_with_any_method_keeps_the_targets_text(
    name: str, make: Callable[[PacedModel], Proposer], temperature: float
) -> None:
    kept = Kept(make)
    features = CAPTURED if name == "eagle" else None
    async with running_scorer(in_process=kept, features=features) as scorer:
        outputs = await generate_all(scorer, temperature=temperature)
        plain = await generate_all(scorer, temperature=temperature, enabled=False)
        [proposer] = scorer.hub.registry.proposers
        assert (proposer.window.on_the_way, proposer.prompt_window.on_the_way) == (0, 0)
        assert scorer.metric("step_time_seconds_sum", part="draft") > 0.0
    assert [each.token_ids for each in outputs] == [each.token_ids for each in plain]
    aux = [each.aux_info for each in outputs]
    assert {tuple(each.proposer_ids) for each in aux} == {("in-process-0",)}
    assert all(each.waits <= 1 for each in aux), "for a first draft at most"
    assert kept.method.num_sessions == 0, "all of them are over"
    if isinstance(kept.method, RowReader):
        assert kept.method.wrong == 0
        assert kept.method.rows_seen > sum(map(len, PROMPTS))
    if name != "ngram" and temperature == 0.0:
        assert sum(each.accepted for each in aux) > 30


class Switched(FixedPolicy):
    """Drafts for no row unless it is `on`."""

    on = False

    @property
    def drafting(self) -> bool:
        return self.on

    def choose_counts(self, rows: Sequence[Drafting]) -> list[int]:
        return [self.on * count for count in super().choose_counts(rows)]


async def test_draft_model_hears_of_no_text_before_the_policy_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[int] = []

    def noted(model: PacedModel) -> DraftModelProposer:
        method = draft_model(model)
        open_ = method.open

        def told(session: SessionKey, start: SessionStart) -> None:
            opened.append(len(start.prefix))
            open_(session, start)

        method.open = told  # type: ignore[method-assign]
        return method

    kept = Kept(noted)
    async with running_scorer(in_process=kept, policy=Switched, pause_s=0.002) as scorer:
        assert isinstance(kept.method, DraftModelProposer)
        model = kept.method._model
        assert isinstance(model, HashModel)
        plain = await generate_all(scorer)
        assert all(each.aux_info.drafted == 0 for each in plain)
        assert (model.forwards, opened) == (0, [])
        call = scorer.stub.Generate(generate_request(PROMPTS[2], max_tokens=100))
        tokens = list((await call.read()).token_ids)
        monkeypatch.setattr(Switched, "on", True)
        while (message := await call.read()) is not grpc.aio.EOF:
            tokens += message.token_ids
            last = message
        assert tokens == scorer.model.greedy_text(PROMPTS[2], 100)
        assert last.aux_info.accepted > 50
        assert model.forwards > 0
        assert len(opened) == 1
        assert opened[0] > len(PROMPTS[2]), "with what it missed"


async def test_method_without_drafts_hears_of_a_text_when_it_ends_and_misses_none() -> None:
    heard: list[tuple[int, int]] = []

    class Heard(NgramProposer):
        def commit(
            self, session: SessionKey, base_len: int, tokens: Sequence[int], num_draft_tokens: int
        ) -> None:
            heard.append((base_len, len(tokens)))
            super().commit(session, base_len, tokens, num_draft_tokens)

    kept = Kept(lambda _: Heard(prompt_lookup_min=1, max_branches=0))
    async with running_scorer(in_process=kept, policy=Switched) as scorer:
        output = await scorer.generate(PROMPTS[2], max_tokens=50)
        assert len(output.token_ids) == 50
    assert heard == [(len(PROMPTS[2]), 50)]


@pytest.mark.parametrize(("before_prompts", "beside"), [(True, 0), (True, 1), (False, 0)])
async def test_draft_model_processes_no_prompt_before_the_target_but_a_lone_requests(
    before_prompts: bool, beside: int
) -> None:
    """Else all who come together would wait for it."""
    order: list[tuple[str, int]] = []

    class Noted(HashModel):
        def forward(self, batch: PackedBatch) -> Tensor:
            order.append(("draft", len(batch.input_ids)))
            return super().forward(batch)

    def noted(target: PacedModel) -> DraftModelProposer:
        forward = target.forward
        model = Noted(VOCAB, num_pages=512, max_model_len=MAX_LEN)

        def told(batch: PackedBatch) -> Tensor:
            order.append(("target", len(batch.input_ids)))
            return forward(batch)

        target.forward = told  # type: ignore[method-assign]
        return DraftModelProposer(model, name="hash", limits=ProposerLimits(max_branches=0))

    setup = {"in_process": noted, "drafts_before_prompts": before_prompts}
    async with running_scorer(pause_s=0.001, **setup) as scorer:
        other = generate_request([1], max_tokens=150)
        others = [scorer.stub.Generate(other) for _ in range(beside)]
        for call in others:
            await call.read()
        order.clear()
        output = await scorer.generate(PROMPTS[3], max_tokens=40)
        assert output.token_ids == scorer.model.greedy_text(PROMPTS[3], 40)
        for call in others:
            call.cancel()
    prompts = [name for name, num_tokens in order if num_tokens >= len(PROMPTS[3])]
    first = ["draft", "target"] if before_prompts and not beside else ["target", "draft"]
    assert prompts[:2] == first
    assert output.aux_info.accepted > 20


async def test_in_process_proposer_with_several_drafts_posts_them_at_one_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By that the policy knows a batch: the first of its drafts tells what it took."""
    came: list[float | None] = []
    post_block = Engine.post_block

    def noted(self: Engine, block: PostedBlock) -> object:
        came.append(block.arrived_at)
        return post_block(self, block)

    monkeypatch.setattr(Engine, "post_block", noted)
    async with running_scorer(in_process=draft_model, pause_s=0.001) as scorer:
        await generate_all(scorer)
    assert 2 * len(set(came)) < len(came)


class Broken(NgramProposer):
    """Fails in `where` whenever its turn has come so often."""

    def __init__(self, where: str, every: int) -> None:
        super().__init__(prompt_lookup_min=1, max_branches=0)
        self.failures = 0
        self._where, self._every, self._calls = where, every, 0

    def _maybe_fail(self, where: str) -> None:
        self._calls += where == self._where
        if where == self._where and self._calls % self._every == 0:
            self.failures += 1
            raise RuntimeError("the method fell over")

    def open(self, *args: object) -> None:
        self._maybe_fail("open")
        super().open(*args)  # type: ignore[arg-type]

    def commit(self, *args: object) -> None:
        self._maybe_fail("commit")
        super().commit(*args)  # type: ignore[arg-type]

    def close(self, session: SessionKey) -> None:
        self._maybe_fail("close")
        super().close(session)

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:
        self._maybe_fail("draft")
        return super().draft(sessions, pace)

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:
        self._maybe_fail("ahead")
        return super().ahead(sessions, pace)


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("where", ["open", "commit", "close", "draft", "ahead"])
async def test_in_process_proposer_when_method_fails_loses_its_drafts_alone(
    where: str, every: int
) -> None:
    kept = Kept(lambda _: Broken(where, every))
    async with running_scorer(in_process=kept) as scorer:
        for _ in range(2):
            for prompt, output in zip(PROMPTS, await generate_all(scorer), strict=True):
                assert output.token_ids == scorer.model.greedy_text(prompt, 40)
        assert isinstance(kept.method, Broken)
        assert 1 <= kept.method.failures <= 3
        tried_on = bool(scorer.hub.registry.proposers)
        assert tried_on == (kept.method.failures < 3), "three times, and no more is tried"


async def test_in_process_proposer_when_method_keeps_failing_is_given_up() -> None:
    kept = Kept(lambda _: Broken("commit", 1))
    async with running_scorer(in_process=kept) as scorer, asyncio.timeout(20):
        while scorer.hub.registry.proposers:
            output = await scorer.generate(PROMPTS[1], max_tokens=20)
            assert output.token_ids == scorer.model.greedy_text(PROMPTS[1], 20)
        assert isinstance(kept.method, Broken)
        assert kept.method.failures == 3


async def test_in_process_proposer_when_full_opens_sessions_later() -> None:
    """By then the engine has gone on with them: what is drafted after is what it knows."""
    kept = Kept(lambda model: draft_model(model, max_sessions=2))
    async with running_scorer(in_process=kept, pause_s=0.001) as scorer:
        outputs = await generate_all(scorer)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output.token_ids == scorer.model.greedy_text(prompt, 40)
        late = [each.aux_info for each in outputs if each.aux_info.k_histogram[0] > 2]
        assert len(late) >= 2
        assert sum(each.accepted > 0 for each in late) >= 2


async def test_in_process_proposer_with_lost_sessions_reopens_them() -> None:
    """The pages hold some of the texts: others give way, and come back."""
    model = HashModel(VOCAB, num_pages=60, max_model_len=MAX_LEN)
    kept = Kept(
        lambda _: DraftModelProposer(model, name="hash", limits=ProposerLimits(max_branches=0))
    )
    async with running_scorer(in_process=kept) as scorer:
        for _ in range(3):
            for prompt, output in zip(PROMPTS, await generate_all(scorer), strict=True):
                assert output.token_ids == scorer.model.greedy_text(prompt, 40)
    assert kept.method.num_sessions == 0


async def test_in_process_proposer_when_requests_are_cancelled_keeps_nothing() -> None:
    kept = Kept(draft_model)
    async with running_scorer(in_process=kept, pause_s=0.002) as scorer:
        calls = [scorer.stub.Generate(generate_request(p, max_tokens=90)) for p in PROMPTS]
        for call in calls:
            await call.read()
            call.cancel()
        await scorer.until(lambda: kept.method.num_sessions == 0, "all sessions are closed")
        assert (await scorer.generate(PROMPTS[0])).aux_info.accepted > 0


async def test_in_process_proposer_with_other_proposers_lets_requests_choose() -> None:
    async with (
        running_scorer(in_process=ngram) as scorer,
        serving(scorer.address, draft_model(scorer.model)),
    ):
        await scorer.until(lambda: len(scorer.hub.registry.proposers) == 2, "both are attached")
        chosen = [await scorer.generate(PROMPTS[3], method=m) for m in ("ngram", "draft_model")]
        assert chosen[0].token_ids == chosen[1].token_ids
        ids = [list(each.aux_info.proposer_ids) for each in chosen]
        assert ids[0] == ["in-process-0"] != ids[1]


async def test_in_process_proposer_when_another_leaves_takes_over_its_sessions() -> None:
    async with running_scorer(in_process=draft_model, pause_s=0.002) as scorer:
        [here] = scorer.hub.registry.proposers
        here.draining = True  # no place yet
        async with proposing(guessing(scorer)):
            call = scorer.stub.Generate(generate_request(PROMPTS[2], max_tokens=100))
            tokens = list((await call.read()).token_ids)
            here.draining = False
        while (message := await call.read()) is not grpc.aio.EOF:
            tokens += message.token_ids
            last = message
        assert tokens == scorer.model.greedy_text(PROMPTS[2], 100)
        assert set(last.aux_info.proposer_ids) == {"proposer-0", "in-process-0"}


async def test_in_process_proposer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--in-process-proposer: eagle needs"):
        async with running_scorer(in_process=reads()):
            pass
