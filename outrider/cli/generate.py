"""`outrider generate`: a completion from a running gateway."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from outrider.cli.client import stream
from outrider.cli.process import run_until_signal
from outrider.cli.render import aux_table, write_tokens
from outrider.errors import ConfigError
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, generation_pb2


def run_generate(args: argparse.Namespace) -> int:
    """Stream the completion to stdout; everything else goes to stderr."""
    if args.prompt == "-":
        if sys.stdin.isatty():
            raise ConfigError("no prompt: give one as an argument or on stdin.")
        try:
            args.prompt = sys.stdin.read()
            args.prompt.encode()  # some locales read any bytes
        except UnicodeError as error:
            raise ConfigError("the prompt on stdin is not UTF-8 text.") from error
    return run_until_signal(_generate(args))


async def _generate(args: argparse.Namespace) -> int:
    request = generation_pb2.GenerateRequest(
        model=args.model,
        text=args.prompt,
        sampling=common_pb2.SamplingParams(temperature=args.temperature, seed=args.seed),
        stop=common_pb2.StopParams(max_tokens=args.max_tokens),
        speculation=common_pb2.SpeculationParams(
            enabled=args.speculation == "on",
            methods=args.method.split(",") if args.method else (),
            num_speculative_tokens=args.num_speculative_tokens,
        ),
        aux_info=args.aux_info,
    )
    console = Console()
    async with open_channel(args.address) as channel:
        answer = stream(
            channel, request, timeout_s=args.timeout, api_key=args.api_key, address=args.address
        )
        async for response in answer:
            if console.is_terminal:
                write_tokens(console, response.tokens)
            else:
                sys.stdout.write(response.text)
                sys.stdout.flush()
            if response.HasField("aux_info"):
                sys.stdout.write("\n")
                Console(stderr=True).print(aux_table({"": response.aux_info}))
    if console.is_terminal:
        print()
    return 0
