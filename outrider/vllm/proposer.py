"""The class that vLLM's `custom_class` method takes: drafts come from proposers that dial in.

    vllm serve MODEL --speculative-config '{"method": "custom_class",
        "model": "outrider.vllm.proposer.RemoteProposer", "num_speculative_tokens": 4}'

It lives in each worker process. Tensor-parallel rank 0 hosts the draft side and decides; the others
get its decision. No fault of the draft side reaches vLLM: a step without drafts is slower, and
right.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.config import HAND_OVER_S
from outrider.errors import ConfigError, InvalidRequestError
from outrider.params import MAX_SPECULATIVE_TOKENS, VerificationRule
from outrider.types import RequestStats
from outrider.vllm import adapter, versions
from outrider.vllm.ahead.branch_table import BranchTable
from outrider.vllm.ahead.placed_drafts import PlacedDrafts
from outrider.vllm.ahead.steps import StepsAhead
from outrider.vllm.draft_host import DraftHost
from outrider.vllm.draft_server import DraftServer, ServerOptions, states_read_by
from outrider.vllm.hidden_states.capture import Capture, hand_out_layers, states_of
from outrider.vllm.requests import read_request
from outrider.vllm.waiting import POLICIES

if TYPE_CHECKING:
    from torch import Tensor

    from scorer_service.drafting.in_process import InProcessProposer

_MAX_FAULTS = 16  # then the draft side is given up
_WORKER = "outrider.vllm.worker.GPUWorker"
NO_FEATURES = (
    "start it with --hidden-features {states} (`vllm serve` takes it in --additional-config), or "
    "use vLLM's own method in its --speculative-config (eagle, eagle3, mtp, medusa)"
)
NOT_COUPLED = (
    "--async-scheduling takes proposers only where sampling is coupled: leave out --logprobs-mode, "
    "or write --no-async-scheduling."
)
_log = logging.getLogger(__name__)
Found = TypeVar("Found")


class RemoteProposer:
    """Implements vLLM's interface of a custom proposer."""

    def __init__(self, vllm_config: Any) -> None:
        """Read the plug-in's flags. Raises `ConfigError`."""
        self._served = served = adapter.read_config(vllm_config)
        if served.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:  # of which nobody could be asked
            raise ConfigError(f"num_speculative_tokens is {MAX_SPECULATIVE_TOKENS} at most.")
        self._options = ServerOptions.parse(served.flags, served.replica)
        self._runner: Any = None
        self._host: DraftHost | None = None  # on tensor-parallel rank 0
        self._server: DraftServer | None = None
        self._rule = VerificationRule.REJECTION
        self._ahead = adapter.schedules_ahead(vllm_config)
        self._methods = self._options.methods(served.model, served.device)
        asked = self._options.hidden_features or states_read_by(self._methods)
        self._features = None if asked is None else states_of(asked, vllm_config)
        self._num_faults = 0
        self.info: dict[str, str] = {}
        """The draft side's addresses and the verification rule."""

    def load_model(self, *_: Any, **__: Any) -> None:
        """Load nothing; find the model runner, which calls this while it loads the target."""
        runner = adapter.find_runner(self)
        if runner is not None:
            self.bind(runner)
        else:
            _log.error("nothing is drafted unless vLLM has --worker-cls %s", _WORKER)

    def bind(self, runner: Any) -> None:
        """Begin to follow a model runner, once. Raises `ConfigError` for a port that is taken."""
        import torch

        from outrider.vllm.coupled import couple

        if self._runner is not None:
            return
        adapter.log_with_vllm()
        if note := versions.untried():
            lacking = versions.missing_names()
            _log.warning("%s It lacks: %s", note, "; ".join(lacking) or "nothing")
        self._runner, served = runner, self._served
        if self._features is not None:
            hand_out_layers(runner, self._features)
        self._rule = couple(runner, served.seed)
        self.info = {"verification": self._rule.value}
        if self._ahead:
            if self._rule is not VerificationRule.COUPLED:
                raise ConfigError(NOT_COUPLED)
            StepsAhead(runner, self, served.max_num_seqs, served.num_speculative_tokens)
            # The first time takes long, and memory that vLLM should count.
            adapter.share(torch.zeros(1, dtype=torch.int32, device=runner.device))
        if adapter.tensor_parallel_rank() > 0:
            return
        policy = POLICIES[self._options.speculation_policy](served.num_speculative_tokens)
        self._host = host = DraftHost(
            served.num_speculative_tokens,
            served.max_model_len,
            served.max_num_seqs,
            policy=policy,
            max_graph_rows=adapter.max_graph_rows(runner.vllm_config),
            ahead=self._ahead,
        )
        if self._features is not None:
            host.keep(Capture(runner, adapter.find_worker(runner), self._features).states)
        colocated = self._build_colocated(host)
        self._server = DraftServer(host, self._options, colocated)
        model = served_model(served, self._options, str(runner.device))
        self.info |= self._server.start(replace(model, features=self._features))
        if not self._ahead:
            adapter.watch_steps(runner, self.begin, self.launched)
        _log.info(
            "proposers may dial %s; sampling is %s; metrics of drafts: %s",
            *(self.info["grpc"], self._rule.value, self.info["metrics"]),
        )

    def _build_colocated(self, host: DraftHost) -> InProcessProposer | None:
        """Return the proposer on this thread, if any. Raises `ConfigError`."""
        if not self._methods:
            return None
        from outrider.drafting.building.methods import build_proposer
        from scorer_service.drafting.in_process import InProcessProposer

        say = partial(_log.info, "the proposer in vLLM's worker: %s")
        build = partial(build_proposer, self._methods, self._served.max_num_seqs, say)
        colocated = InProcessProposer(build, f"{self._options.scorer_id}-in-process")
        colocated.build()
        colocated.put_projection(host.engine)
        host.draft_with(colocated)
        return colocated

    def stop(self) -> None:
        """Say goodbye to proposers."""
        if self._server is not None:
            self._server.stop()

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        **_: Any,
    ) -> list[list[int]] | None:
        """Return draft tokens of each row of the batch, after what the step emitted for it.

        None with `--async-scheduling`: there they are chosen just before the next step runs.
        """
        if self._ahead:
            return None
        num_rows = len(sampled_token_ids)
        if self._runner is None:
            return [[]] * num_rows
        names = self._runner.input_batch.req_ids
        lengths = num_tokens_no_spec[:num_rows].tolist()
        texts = lambda row, length: token_ids_cpu[row, :length].tolist()  # noqa: E731
        output = adapter.StepOutput(names, sampled_token_ids, lengths, texts)
        return self.next_drafts(output, names[:num_rows])

    def next_drafts(
        self, output: adapter.StepOutput | None, names: Sequence[str]
    ) -> list[list[int]]:
        """Commit what a step emitted; return rank 0's drafts for the next one, on each rank."""

        def choose(host: DraftHost) -> list[list[int]]:
            if output is not None:
                host.take_early()  # so that a draft is walked once
                host.commit(*output)
            if names:
                return host.choose_drafts(names)
            host.tell()
            return []

        drafts = self._tend("drafts were not chosen", choose) or [[]] * len(names)
        return adapter.agreed(drafts) if names else []

    # For steps that are scheduled ahead: see `outrider.vllm.ahead.draft_side`.

    def agreed(self, value: int) -> int:
        return adapter.agreed(value)

    def share(self, tokens: Tensor) -> None:
        adapter.share(tokens)

    def drafts_behind(self, rooms: Mapping[str, int]) -> PlacedDrafts | None:
        return self._tend("drafts were not placed", lambda host: host.drafts_behind(rooms))

    def begin_prompts(self, names: Iterable[str]) -> None:
        self._tend("states were not read", lambda host: host.begin_prompts(names))

    def write_branches(self, places: Mapping[str, int], table: BranchTable) -> bool:
        fault = "branches were not written"
        return bool(self._tend(fault, lambda host: host.write_branches(places, table)))

    def await_branches(self, table: BranchTable, known: Callable[[], bool]) -> bool:
        fault = "branches were not awaited"
        return bool(self._tend(fault, lambda host: host.await_branches(table, known)))

    def add_branches(self, table: BranchTable, known: Callable[[], bool]) -> None:
        self._tend("branches were not written", lambda host: host.add_branches(table, known))

    def commit(self, output: adapter.StepOutput) -> None:
        def commit(host: DraftHost) -> None:
            host.commit(*output)
            host.draft_now()
            host.tell()
            if host.reports:  # which the event loop does
                time.sleep(HAND_OVER_S)

        self._tend("a step was not committed", commit)

    def chosen(self, lengths: dict[str, int]) -> None:
        self._tend("drafts were not noted", lambda host: host.chosen(lengths))

    def take_stats(self, name: str) -> RequestStats | None:
        """Return the account of a request by vLLM's id; see `DraftHost.take_stats`."""
        return None if self._host is None else self._host.take_stats(name)

    def begin(self, plan: adapter.StepPlan, began: float | None = None) -> None:
        if (host := self._host) is None:
            return
        try:
            host.begin_step(plan.finished, plan.scheduled, plan.verified, began)
            coupled = self._rule is VerificationRule.COUPLED
            for new in plan.new:
                session_id = host.next_session_id()
                try:
                    made = read_request(new, session_id, self._served, coupled=coupled)
                except InvalidRequestError as error:  # costs this one's drafts only
                    _log.warning("nothing is drafted for %s: %s", new.req_id, error)
                    continue
                if made is not None:
                    request, extras, stop_ids = made
                    host.open(new.req_id, request, stop_ids, extras.traceparent)
        except Exception:
            self._log_fault("a step was not noted")

    def launched(self) -> None:
        self._tend("a step was not counted", lambda host: host.account())

    def sampled(
        self, names: Sequence[str], emitting: Collection[int], tokens: Callable[[], Tensor]
    ) -> None:
        fault = "drafts were not launched"
        self._tend(fault, lambda host: host.draft_behind(names, emitting, tokens))

    def undrafted(self, names: Sequence[str]) -> frozenset[str]:
        if self._host is None:  # it was given up; what other ranks say nobody reads
            return frozenset(names)
        any_step = adapter.captures_any_step(self._runner.vllm_config)
        fault = "rows without drafts were not found"
        found = self._tend(fault, lambda host: host.undrafted(names, any_step=any_step))
        return frozenset() if found is None else found

    def awaited(self) -> None:
        self._tend("drafts were not taken", lambda host: host.take_early())

    def _tend(self, fault: str, call: Callable[[DraftHost], Found]) -> Found | None:
        """Return what the host returns; None without one, or after a fault."""
        try:
            return None if self._host is None else call(self._host)
        except Exception:
            self._log_fault(fault)
            return None

    def _log_fault(self, what: str) -> None:
        self._num_faults += 1
        if self._host is not None:
            self._host.distrust()
        if self._num_faults < _MAX_FAULTS:
            _log.exception("%s; requests go on", what)
        else:
            _log.exception("%s; requests go on, without drafts until vLLM is restarted", what)
            self._host = None
            self.stop()


def served_model(served: adapter.Served, options: ServerOptions, device: str) -> Any:
    """Return the `ServedModel` that proposers are checked against."""
    from outrider.device import device_id
    from outrider.models.resolve import resolve_model
    from outrider.models.tokenizer import hash_if_any
    from scorer_service.config import ServedModel

    try:
        tokenizer_hash = hash_if_any(Path(resolve_model(served.tokenizer, "target")))
    except Exception as error:
        _log.warning("the tokenizer was not read, so proposers' is not compared: %s", error)
        tokenizer_hash = ""
    return ServedModel(
        scorer_id=options.scorer_id,
        model=served.model,
        served_model_name=served.served_model_name,
        tokenizer_hash=tokenizer_hash,
        vocab_size=served.vocab_size,
        max_model_len=served.max_model_len,
        dtype=served.dtype,
        eos_token_ids=frozenset(),
        num_speculative_tokens=served.num_speculative_tokens,
        no_features=NO_FEATURES,
        device=device_id(device if ":" in device or device == "cpu" else f"{device}:0"),
    )
