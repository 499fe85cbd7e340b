"""A request of OpenAI's API as the completions that answer it, apart from how it came."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

from gateway.chat import Plan, plan_chat
from gateway.generation import Chunk, Direct, Ending, Generator, RequestMaker
from gateway.intake import GenerationRequest, Settings
from gateway.merge import merged, one_ahead
from gateway.openai.advice import read_advice
from gateway.openai.choices import Completion, ScoredPrompt, Shaper
from gateway.openai.deltas import MessageReading
from gateway.openai.requests import ChatRequest, CompletionRequest, Request
from gateway.output import OutputToken
from outrider.params import require
from outrider.rpc.telemetry import Metadata

_WHOLE_INTERVALS: Final = range(33, 65)
"""Tokens at a time of an answer that is sent whole: what is lost at most if its scorer dies.

Requests that begin together get different numbers, so that not all are worked on in one step.
"""

MAX_ANSWER_LOGPROBS: Final = 2**20
"""Of prompts, with the likeliest tokens, over all choices: some 60 MB of JSON."""


@dataclass(frozen=True, slots=True)
class Job:
    """Completions to run, prompt by prompt, and how their answer is shaped."""

    work: tuple[GenerationRequest, ...]
    shaper: Shaper
    names: Mapping[str, str]
    """Parameters that a scorer may refuse -> the client's names of them."""
    scores_only: bool
    """True: the one token that each completion generates is left out."""


def admit(body: Request, generator: Generator) -> ExitStack:
    """Take places for all completions of a request, which are given back when it is closed.

    Raises `InvalidRequestError` and `CapacityError`.
    """
    places = ExitStack()
    places.enter_context(generator.admission.admitted(num_completions(body, generator)))
    return places


def num_completions(body: Request, maker: RequestMaker) -> int:
    """Return how many completions answer a request.

    Raises `InvalidRequestError` for more than could ever run at once.
    """
    prompts = len(body.prompts()) if isinstance(body, CompletionRequest) else 1
    n, per_prompt = body.num_choices()
    param = "prompt" if prompts > 1 else "best_of" if per_prompt > n else "n"
    maker.check_size(prompts * per_prompt, param)
    return prompts * per_prompt


async def make_job(body: Request, maker: RequestMaker, tenant: str, request_id: str = "") -> Job:
    """Tokenise and check a request; without an id it gets one. Raises `InvalidRequestError`."""
    model = maker.intake.check_model(body.model)
    prompts: Sequence[Sequence[int]]
    echoes: tuple[str, ...] = ()
    if isinstance(body, ChatRequest):
        plan = await plan_chat(body.chat(), maker)
        prompts = [plan.token_ids]
    else:
        assert isinstance(body, CompletionRequest)
        prompts, echoes, ends = await _prompts(body, maker)
        plan = Plan(*body.constraint(), ends=ends)
    _check_scores(body, prompts)
    request_id = request_id or uuid.uuid4().hex
    work = await _work(body, prompts, maker, plan, tenant, request_id)
    n, per_prompt = body.num_choices()
    shaper = Shaper(
        kind=body.operation,
        request_id=f"{body.id_prefix}-{request_id}",
        model=model,
        created=int(time.time()),
        n=n,
        per_prompt=per_prompt,
        aux_info=bool(body.aux_info),
        token_kinds=bool(body.token_kinds),
        with_logprobs=body.wanted_logprobs() is not None,
        with_drafts=bool(body.draft_trees),
        include_usage=body.include_usage,
        prompt_lens=tuple(len(each.prompt_token_ids) for each in work)
        if body.continuous_usage
        else (),
        predicted=body.prediction is not None or bool(work[0].speculation.advice.token_ids),
        spell=maker.tokenizer.token_bytes,
        reading=_reading(body, plan),
        top_prompt_logprobs=body.prompt_logprobs,
        echoes=echoes,
        prompts=await _scored_prompts(body, work[::per_prompt], maker, echoed=bool(echoes)),
    )
    names = {} if plan.constraint is None else {plan.constraint.kind.value: plan.param}
    return Job(work=tuple(work), shaper=shaper, names=names, scores_only=body.scores_only)


def run_job(
    job: Job,
    generator: Generator,
    deadline: float,
    metadata: Metadata | None = None,
    direct: Direct | None = None,
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Return an iterator over the chunks of all completions, with their completion's index.

    A single completion's are left out as far as `direct` sends them.
    A prompt's other choices find it in the cache of the first. Raises `OutriderError`s.
    """
    if len(job.work) > 1:
        direct = None  # it would come before chunks of others that wait to be sent

    def streams() -> Iterator[AsyncGenerator[Chunk, None]]:
        size = job.shaper.per_prompt
        for start in range(0, len(job.work), size):
            yield from one_ahead(
                [
                    generator.generate(request, deadline, metadata, direct)
                    for request in job.work[start : start + size]
                ]
            )

    return merged(streams())


def completions_of(job: Job, chunks: Iterable[tuple[int, Chunk]]) -> Sequence[Completion]:
    """Return the completions of an answer that is sent whole, prompt by prompt."""
    tokens: list[list[OutputToken]] = [[] for _ in job.work]
    endings: dict[int, Ending] = {}
    for index, chunk in chunks:
        if not job.scores_only:
            tokens[index] += chunk.tokens
        if chunk.ending is not None:
            endings[index] = chunk.ending.of_prompt() if job.scores_only else chunk.ending
    return [Completion(tuple(mine), endings[index]) for index, mine in enumerate(tokens)]


def _reading(body: Request, plan: Plan) -> MessageReading | None:
    if plan.reading is None or not isinstance(body, ChatRequest):
        return None
    return MessageReading(plan.reading, with_reasoning=body.include_reasoning is not False)


def _check_scores(body: Request, prompts: Sequence[Sequence[int]]) -> None:
    """Raise `InvalidRequestError` for more logprobs of prompts than one answer can hold."""
    top = body.wanted_prompt_logprobs()
    if top is None:
        return
    told = sum(map(len, prompts)) * (1 + top) * body.num_choices()[0]
    require(
        told <= MAX_ANSWER_LOGPROBS,
        body.prompt_param,
        f"split among several requests: {told} logprobs of prompts are asked for, and an answer "
        f"has at most {MAX_ANSWER_LOGPROBS}",
    )


async def _scored_prompts(
    body: Request, firsts: Sequence[GenerationRequest], maker: RequestMaker, *, echoed: bool
) -> tuple[ScoredPrompt, ...]:
    """Return the tokens of prompts whose logprobs are told, or nothing.

    Only an echo tells what each adds to the text.
    """
    if body.wanted_prompt_logprobs() is None:
        return ()
    tokenizer = maker.tokenizer
    prompts = []
    for request in firsts:
        token_ids = request.prompt_token_ids
        texts: tuple[str, ...] = ()
        if echoed:
            push = tokenizer.detokenizer().push  # a thread, as for `Intake.encode`
            texts = await asyncio.to_thread(
                lambda ids, push: tuple(map(push, ids)), token_ids, push
            )
        prompts.append(ScoredPrompt(token_ids, texts))
    return tuple(prompts)


async def _prompts(
    body: CompletionRequest, maker: RequestMaker
) -> tuple[list[Sequence[int]], tuple[str, ...], frozenset[int]]:
    """Return the prompts' tokens, their texts if the answer repeats them, and what ends answers.

    Raises `InvalidRequestError`.
    """
    prompts, intake = body.prompts(), maker.intake
    token_ids: list[Sequence[int]] = []
    ends: frozenset[int] = frozenset()
    for prompt in prompts:
        if isinstance(prompt, list):
            require(not body.suffix, "prompt", "text where there is a suffix")
            token_ids.append(prompt)
        elif body.suffix:
            known, ends = await intake.encode_infill(prompt, body.suffix, "prompt")
            token_ids.append(known)
        else:
            token_ids.append(await intake.encode(prompt, "prompt"))
    echoes: list[str] = []
    for prompt in prompts if body.echo else ():
        if not isinstance(prompt, str):
            prompt = await asyncio.to_thread(maker.tokenizer.decode, prompt)
        echoes.append(prompt)
    return token_ids, tuple(echoes), ends


async def _work(
    body: Request,
    prompts: Sequence[Sequence[int]],
    maker: RequestMaker,
    plan: Plan,
    tenant: str,
    request_id: str,
) -> list[GenerationRequest]:
    """Return the completions to run, prompt by prompt. Raises `InvalidRequestError`."""
    intake = maker.intake
    n, per_prompt = body.num_choices()
    top_logprobs = body.wanted_logprobs()
    advice = await read_advice(body, intake)
    settings = Settings(
        operation=body.operation,
        sampling=body.sampling(0),
        speculation=replace(body.speculation_params(), advice=advice),
        request_id=request_id,
        constraint=plan.constraint,
        marks=() if plan.reading is None else plan.reading.special,
        thinking=None if body.scores_only else plan.thinking,
        # The best of several are known by their logprobs.
        top_logprobs=0 if per_prompt > n and top_logprobs is None else top_logprobs,
        prompt_logprobs=body.wanted_prompt_logprobs(),
        tenant=tenant,
        stream_interval=0 if body.stream else random.choice(_WHOLE_INTERVALS),
        adapter=intake.adapter_of(intake.check_model(body.model)),
        draft_trees=bool(body.draft_trees),
        affinity=(body.prompt_cache_key or "").encode("utf-8", "backslashreplace") or plan.affinity,
    )
    limits = body.limits()
    if not limits.ignore_eos:
        limits = replace(limits, stop_token_ids=limits.stop_token_ids | plan.ends)
    firsts: list[GenerationRequest] = []
    for token_ids in prompts:  # without a seed, each draws one of its own
        seed = intake.default_seed() if body.seed is None else 0
        own = replace(settings, sampling=body.sampling(seed))
        firsts.append(intake.prepare(token_ids, body.prompt_param, limits, own))
    if len(firsts) * per_prompt == 1:
        return firsts
    return [
        first.choice(index, f"{request_id}-{number * per_prompt + index}")
        for number, first in enumerate(firsts)
        for index in range(per_prompt)
    ]
