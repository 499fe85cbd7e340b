"""A fake scorer in a process of its own, which can be stopped or killed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import Popen

from google.protobuf import json_format

from outrider.v1 import scorer_pb2
from tests.support.services.fake_scorer import FakeScorer, Script, serving
from tests.support.services.up import addresses, service


@contextmanager
def scorer_process(fake: FakeScorer) -> Iterator[tuple[Popen[str], str]]:
    """One that answers as `fake` does at its usual pace; its process and its address."""
    script = fake.script
    said = json.dumps([script.completion, script.prompt_len, script.per_round, script.delay_s])
    info = json_format.MessageToJson(fake.info)
    with service("tests.support.services.fake_scorer_process", said, info) as process:
        yield process, addresses(process)["grpc"]


async def main(said: str, info: str) -> None:
    """Serve until killed."""
    completion, prompt_len, per_round, delay_s = json.loads(said)
    script = Script(completion, prompt_len, per_round=per_round, delay_s=delay_s)
    fake = FakeScorer(script, json_format.Parse(info, scorer_pb2.GetScorerInfoResponse()))
    async with serving(fake):
        print(f"ready {json.dumps({'grpc': fake.target})}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
