"""vLLM's `AsyncLLM` as the engine of a scorer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from outrider.config import MAX_WAITING
from outrider.counts import Admission, StepCounts
from outrider.draft_port import DraftOffer, HiddenStateControl, NoHiddenStates, PostedBlock
from outrider.engines import INSTALL
from outrider.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OutriderError,
    UnavailableError,
)
from outrider.models.eos import read_eos_token_ids
from outrider.models.weight_files import check_float8
from outrider.params import SamplingParams, StopParams, VerificationRule
from outrider.process.temporary import run_folder, temporary_folder
from outrider.process.watchdog import PATIENCE_S
from outrider.types import (
    Commit,
    EngineInfo,
    EngineSnapshot,
    Failure,
    Request,
    StepEvents,
)
from outrider.vllm import versions
from outrider.vllm.accounts import Accounts
from outrider.vllm.flags import VllmOptions
from outrider.vllm.outputs import Progress
from outrider.vllm.params import Abilities, sampling_fields, structured_fields
from outrider.vllm.reaper import Reaper
from outrider.vllm.start_log import StartLog
from outrider.vllm.stats import Load

_LOOK_S: Final = 1.0
_REASON_CHARS: Final = 500
_STACK_BYTES: Final = 2**27  # reserved; the longest constraint takes 100 MB
_WARM_UP: Final = (
    (SamplingParams(temperature=0.0), None),
    (SamplingParams(temperature=1.0, seed=1), 1),
    (SamplingParams(temperature=1.0, seed=1, top_k=2, top_p=0.9), None),
    (SamplingParams(temperature=0.0, presence_penalty=0.1), None),
)
"""Kinds of requests: their sampling, and the logprobs of likeliest tokens."""
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")
_log = logging.getLogger(__name__)


class VllmEngine:
    """Implements `ServedEngine`. All but `start` and `stop` is used on the event loop.

    As a `DraftingEngine` it takes no drafts: proposers attach to vLLM's worker process.
    """

    drafting = False
    features: HiddenStateControl = NoHiddenStates()

    def __init__(
        self,
        resolve: Callable[[], Path],
        options: VllmOptions,
        on_events: Callable[[StepEvents], None],
    ) -> None:
        """Take a function that returns the model's folder, which may download it."""
        self._resolve = resolve
        self._options = options
        self.draft_target = ""
        """gRPC address of the draft side; empty if vLLM's worker hosts none."""
        self._reaper: Reaper | None = None
        self._folder = contextlib.ExitStack()  # of the draft side's socket
        self._on_events = on_events
        self.running = True
        self._llm: Any = None
        self._adapters: dict[str, Any] = {}  # vLLM's `LoRARequest` by name
        self._info: EngineInfo | None = None
        self._can = Abilities()
        self._load = Load()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._commits: list[Commit] = []  # since the last event
        self._counts = StepCounts()
        self._accounts = Accounts(self._ask)
        self._heard = 0.0  # when vLLM answered last

    def start(self, timeout_s: float) -> EngineInfo:
        """Start vLLM's processes and load the model.

        Raises `ConfigError` with vLLM's own words for flags that it refuses.
        """
        folder = self._resolve()
        check_float8(folder)
        eos_token_ids = read_eos_token_ids(folder)
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout says "ready"
        os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(int(timeout_s)))
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"  # session ids are unique
        # This process has threads, gRPC's among them, and cannot be forked.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        _deepen_stacks()
        try:
            from outrider.vllm.async_llm import build, facts
        except ImportError as error:
            raise ConfigError(_import_failed(error)) from error

        has_tokenizer = any((folder / name).is_file() for name in _TOKENIZERS)
        options = self._options
        if options.takes_proposers:
            options = replace(options, draft_flags=self._listening(options.draft_flags))
        argv = options.argv(str(folder), has_tokenizer=has_tokenizer)
        self._reaper = Reaper()
        log = StartLog()
        try:
            with self._reaper.watching(), log.reading():
                self._llm, self._adapters = build(argv, self._load)
        except OutriderError:
            raise
        except Exception as error:
            reason = _first_line(error)
            if "root cause" in reason:  # "See root cause above", in the log
                reason = log.reason() or reason
            raise ConfigError(
                f"vLLM does not serve this: {reason} {versions.untried()}".rstrip()
            ) from error
        found = facts(self._llm)
        self._can = Abilities(
            num_speculative_tokens=found.num_speculative_tokens, own_method=found.own_method
        )
        self._load.total_pages = found.num_pages
        self._info = EngineInfo(
            vocab_size=found.vocab_size,
            max_model_len=found.max_model_len,
            eos_token_ids=eos_token_ids,
            page_size=found.page_size,
            num_pages=found.num_pages,
            max_num_seqs=self._options.max_num_seqs,
            max_waiting=MAX_WAITING,
            num_speculative_tokens=found.num_speculative_tokens,
            adapters=tuple(self._adapters),
        )
        return self._info

    def _listening(self, flags: tuple[str, ...]) -> tuple[str, ...]:
        """Return the draft side's flags, with a socket that this process dials."""
        path = next((b for a, b in pairwise(flags) if a == "--listen-unix"), None)
        if path is None:
            path = f"{self._folder.enter_context(run_folder(temporary_folder()))}/drafts"
            flags = (*flags, "--listen-unix", path)
        self.draft_target = f"unix:{path}"
        return flags

    async def warm_up(self, timeout_s: float) -> None:
        """Run each kind of request once, since vLLM compiles some samplers at their first use.

        Raises `ConfigError` if vLLM's engine ends over it, and `DeadlineError`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._run_each_kind()
        except TimeoutError:
            raise DeadlineError(
                f"vLLM has not answered its first requests within {timeout_s:g} s."
            ) from None
        if not self.running:
            raise ConfigError("vLLM's engine died at its first request; its log above says why.")

    async def _run_each_kind(self) -> None:
        assert self._info is not None
        if self.draft_target:
            told = await self._llm.collective_rpc("outrider_info")
            verification = next((each["verification"] for each in told if each), "")
            coupled = verification == VerificationRule.COUPLED.value
            self._can = replace(self._can, coupled=coupled, takes_proposers=True)
        for name, lora in self._adapters.items():  # else a request would, and end the engine
            try:
                await self._llm.add_lora(lora)
            except Exception as error:
                raise ConfigError(f"--lora-modules {name}: {_first_line(error)}") from error
        for sampling, top_logprobs in _WARM_UP:
            request = Request(
                session_id=0,  # the hub's begin at 1
                prompt_token_ids=(0,),
                sampling=sampling,
                stop=StopParams(max_tokens=2, ignore_eos=True),
                top_logprobs=top_logprobs,
            )
            fields = sampling_fields(request, self._info, self._can)
            progress = Progress(request, 0, VerificationRule.COUPLED)
            await self._run(request, fields, progress)

    def stop(self, timeout_s: float) -> None:
        """End vLLM's processes, and wait for them; those of a start that goes on are killed."""
        self.running = False
        if self._llm is not None:
            from outrider.vllm.async_llm import end_outputs

            end_outputs(self._llm)
            self._llm.shutdown(timeout=timeout_s)
        if self._reaper is not None and self._llm is not None:
            self._reaper.dismiss()
        elif self._reaper is not None:
            self._reaper.reap()
        self._folder.close()

    def submit(self, request: Request, constraint: Any = None) -> None:  # noqa: ARG002
        """Hand a request to vLLM, which compiles the request's constraint again."""
        info = self._info
        if info is None or not self.running:
            raise UnavailableError("The engine is not running.")
        info.check(request)
        fields = sampling_fields(request, info, self._can)
        if request.constraint is not None:
            fields["structured_outputs"] = structured_fields(request.constraint)
        if len(self._tasks) >= info.max_num_seqs + info.max_waiting:
            raise CapacityError("Too many requests wait already. Try again later.")
        progress = Progress(request, self._can.num_speculative_tokens, self._can.rule(request))
        self._heard = time.monotonic() if not self._tasks else self._heard
        running = asyncio.get_running_loop().create_task(self._run(request, fields, progress))
        self._tasks[request.session_id] = running

    def abort(self, session_id: int) -> None:
        """Cancel a request; vLLM is told by its own generator."""
        task = self._tasks.pop(session_id, None)
        if task is not None:
            task.cancel()

    def snapshot(self) -> EngineSnapshot:
        """Return what vLLM's scheduler said last."""
        return self._load.snapshot()

    async def until_hung(self) -> None:
        """Return when vLLM's processes died, or answer nothing for `PATIENCE_S` though asked."""
        while self.running:
            await asyncio.sleep(_LOOK_S)
            if self._llm.errored:
                _log.error("vLLM's engine died; its log above says why")
                break
            if self._tasks and time.monotonic() - self._heard > PATIENCE_S:
                _log.error("vLLM has answered nothing for %g s", PATIENCE_S)
                break
        self._break_down()

    # As `DraftingEngine`:

    def set_drafting(self, session_id: int, offer: DraftOffer) -> None: ...

    def post_blocks(self, blocks: Iterable[PostedBlock]) -> None: ...

    def between_same_steps(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    # One task per request:

    async def _run(self, request: Request, fields: dict[str, Any], progress: Progress) -> None:
        from outrider.vllm.async_llm import ClientError, EngineDeadError, stream

        session_id = request.session_id
        first = True
        try:
            outputs = stream(
                self._llm,
                str(session_id),
                request.prompt_token_ids,
                fields,
                self._adapters.get(request.adapter),
            )
            async for output in outputs:
                commit = progress.commit(output)
                if commit.finish_reason is not None:
                    if self._can.takes_proposers:
                        told = await self._accounts.ask(str(session_id))
                        commit = commit._replace(stats=progress.stats_with(told))
                    self._tasks.pop(session_id, None)
                self._publish(commit, progress if first else None)
                first = False
            return
        except EngineDeadError:
            self._break_down()
            return
        except OutriderError as error:
            failure: OutriderError = error
        except (ClientError, ValueError) as error:
            param = None if request.constraint is None else request.constraint.kind.value
            reason = " ".join(str(error).split())  # a constraint's has several lines
            refusal = f"vLLM refuses this: {reason[:_REASON_CHARS]}"
            failure = InvalidRequestError(refusal, param=param)
        except Exception as error:
            _log.exception("a request failed")
            failure = InternalError(f"The engine failed: {type(error).__name__}.")
        if self._tasks.pop(session_id, None) is not None:
            self._on_events(StepEvents((), (Failure(session_id, failure),), None))

    async def _ask(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        told = await self._llm.collective_rpc("outrider_stats", args=(list(names),))
        return {name: stats for each in told for name, stats in each.items()}

    def _publish(self, commit: Commit, begun: Progress | None) -> None:
        """Pass on a commit, together with those of the same step."""
        self._heard = time.monotonic()
        counts = self._counts
        counts.output_tokens += len(commit.token_ids)
        if begun is not None:
            stats = begun.stats()
            queue_s = stats.queue_ms / 1e3
            counts.admissions.append(
                Admission(queue_s, stats.prompt_tokens, stats.cached_prompt_tokens)
            )
        if not self._commits:
            asyncio.get_running_loop().call_soon(self._flush)
        self._commits.append(commit)

    def _flush(self) -> None:
        commits, self._commits = tuple(self._commits), []
        counts, self._counts = self._counts, StepCounts()
        counts.rounds = self._load.take_rounds()
        self._on_events(StepEvents(commits, (), None, counts=counts))

    def _break_down(self) -> None:
        self.running = False
        error = UnavailableError("The engine broke down.")  # another one may go on
        failures = tuple(Failure(session_id, error) for session_id in self._tasks)
        tasks, self._tasks = self._tasks, {}
        current = asyncio.current_task()
        for task in tasks.values():
            if task is not current:
                task.cancel()
        self._on_events(StepEvents((), failures, None))


def _deepen_stacks() -> None:
    """Let this process's threads and vLLM's processes follow a constraint's references.

    llguidance does so by recursion, on whatever thread vLLM calls it.
    """
    threading.stack_size(_STACK_BYTES)  # of threads from now on
    most, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
    if most != resource.RLIM_INFINITY and most < wanted:
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))


def _import_failed(error: ImportError) -> str:
    """Return why vLLM cannot be imported: its version, or a library that it lacks."""
    try:
        note = versions.untried()
    except ImportError:
        note = ""
    return f"vLLM cannot be used: {error}. {note or 'Install it anew: ' + INSTALL + '.'}"


def _first_line(error: Exception) -> str:
    """Return what an error says, without pydantic's values, which are pages long."""
    text = str(error)
    if callable(listed := getattr(error, "errors", None)):
        text = "; ".join([_named(each) for each in listed()])
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line), type(error).__name__)


def _named(error: dict[str, Any]) -> str:
    """Return one of pydantic's errors after the setting that it is about, if it is about one."""
    message = str(error.get("msg", "")).removeprefix("Value error, ")
    return ": ".join([*map(str, error.get("loc", ())), message])
