"""`outrider demo`: the same completion with and without speculation, before one's eyes."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass
from importlib import resources

import grpc
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from outrider.cli.client import stream
from outrider.cli.process import run_until_signal
from outrider.cli.render import aux_table, legend, write_tokens
from outrider.cli.serve import stack_of, tell
from outrider.cli.serve_config import take_config
from outrider.cli.services import ServeConfig
from outrider.errors import ConfigError, InternalError
from outrider.models.resolve import EMBEDDED
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, generation_pb2

_TIMEOUT_S = 300.0
_WARM_UP_TOKENS = 24

_HELDOUT_PROMPT = 9  # a line of the file below, from 0: ordinary code that does not soon repeat


def heldout_prompt() -> str:
    """Code that the embedded models have never seen. Raises `ConfigError` if it is not there."""
    file = resources.files("outrider.models") / "data" / "heldout_prompts.jsonl"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise ConfigError("the held-out prompts are missing: give a --prompt.") from error
    prompt: str = json.loads(lines[_HELDOUT_PROMPT])["prompt"]
    return prompt


@dataclass(frozen=True, slots=True)
class Run:
    """One streamed completion and what was measured on the client's side."""

    text: str
    num_tokens: int
    kinds: Counter[int]
    ttft_s: float  # until the first token
    total_s: float
    aux: common_pb2.AuxInfo

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.total_s


def run_demo(args: argparse.Namespace) -> int:
    """Start the stack, show two runs, and stop it. Returns 1 if texts differ that must not."""
    if args.model is None and args.named_model is None:
        args.model = EMBEDDED
    return run_until_signal(_demo(args, take_config(args, tell)))


async def _demo(args: argparse.Namespace, config: ServeConfig) -> int:
    console = Console(highlight=False)
    console.print("Starting scorer, proposer and gateway on loopback ...", style="bold")
    with stack_of(config) as waiting:
        async with waiting as stack:
            await stack.wait_for_proposer()
            watch = asyncio.create_task(stack.supervise())
            show = asyncio.create_task(_show(console, stack.ready["gateway"]["grpc"], args, config))
            try:
                await asyncio.wait({watch, show}, return_when=asyncio.FIRST_COMPLETED)
                if watch.done():
                    watch.result()
                return show.result()
            finally:
                watch.cancel()
                show.cancel()
                await asyncio.gather(watch, show, return_exceptions=True)


async def _show(
    console: Console, address: str, args: argparse.Namespace, config: ServeConfig
) -> int:
    prompt = heldout_prompt() if args.prompt is None else args.prompt

    def request(max_tokens: int, *, speculation: bool) -> generation_pb2.GenerateRequest:
        return generation_pb2.GenerateRequest(
            text=prompt,
            sampling=common_pb2.SamplingParams(temperature=args.temperature, seed=args.seed),
            stop=common_pb2.StopParams(max_tokens=max_tokens),
            speculation=common_pb2.SpeculationParams(enabled=speculation),
            aux_info=True,
        )

    async with open_channel(address) as channel:
        # Both runs then find the prompt in the prefix cache, and everything warm.
        for speculation in (True, False):
            await _run(None, channel, request(_WARM_UP_TOKENS, speculation=speculation))
        console.print(Rule("with speculation"))
        console.print(legend())
        console.print()
        console.print(Text(prompt, style="dim"), end="", soft_wrap=True)
        with_drafts = await _run(console, channel, request(args.max_tokens, speculation=True))
        console.print(Rule("without: same request, speculation off"))
        without = await _run(console, channel, request(args.max_tokens, speculation=False))
    console.print(Rule("side by side"))
    console.print(_comparison(with_drafts, without))
    console.print()
    console.print(aux_table({"with": with_drafts.aux, "without": without.aux}))
    console.print()
    console.print(legend(with_drafts.kinds))
    console.print()
    return verdict(console, with_drafts, without, exact=config.dtype == "float32")


async def _run(
    console: Console | None, channel: grpc.aio.Channel, request: generation_pb2.GenerateRequest
) -> Run:
    """Run one request, showing it on `console` if there is one."""
    pieces: list[str] = []
    kinds: Counter[int] = Counter()
    aux: common_pb2.AuxInfo | None = None
    start = time.perf_counter()
    first: float | None = None
    async for response in stream(channel, request, timeout_s=_TIMEOUT_S):
        if response.tokens and first is None:
            first = time.perf_counter()
        pieces.append(response.text)
        kinds.update(token.kind for token in response.tokens)
        if console is not None:
            write_tokens(console, response.tokens)
        if response.HasField("aux_info"):
            aux = response.aux_info
    end = time.perf_counter()
    if console is not None:
        console.print("\n")
    if aux is None:
        raise InternalError("the gateway sent no aux_info")
    return Run(
        text="".join(pieces),
        num_tokens=kinds.total(),
        kinds=kinds,
        ttft_s=(first or end) - start,
        total_s=end - start,
        aux=aux,
    )


def _comparison(with_drafts: Run, without: Run) -> Table:
    table = Table("", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("with", "without"):
        table.add_column(name, justify="right")
    runs = (with_drafts, without)
    table.add_row("tokens", *(str(run.num_tokens) for run in runs))
    table.add_row("seconds", *(f"{run.total_s:.2f}" for run in runs))
    table.add_row("first token, ms", *(f"{run.ttft_s * 1000:.0f}" for run in runs))
    table.add_row("tokens per second", *(f"{run.tokens_per_s:.1f}" for run in runs), style="bold")
    return table


def verdict(console: Console, with_drafts: Run, without: Run, *, exact: bool) -> int:
    """Say what came out, and return 1 if texts differ that must not."""
    same = with_drafts.text == without.text
    if not same and exact:
        console.print("The texts differ: that is a bug.", style="bold red")
        return 1
    if not (with_drafts.num_tokens and without.num_tokens):
        console.print(
            "The model ended at once, so there is nothing to compare: give another --prompt.",
            style="bold yellow",
        )
        return 0
    speedup = with_drafts.tokens_per_s / without.tokens_per_s
    claim = (
        "The text is identical"
        if same
        else "The texts part at a near tie, as they may in bfloat16 (--dtype float32 is exact)"
    )
    console.print(
        f"{claim}; {speedup:.2f} times as fast with speculation.",
        style="bold green" if same else "bold yellow",
    )
    if speedup > with_drafts.aux.avg_tokens_per_iter:
        console.print(
            "More than its tokens per step can explain: another process slowed the second run.",
            style="yellow",
        )
    return 0
