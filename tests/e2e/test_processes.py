"""What the commands do when processes die, are stopped, or cannot start."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from outrider.cli.client import why_not_attached
from outrider.errors import ProposerRefusedError
from tests.support.services.options import GenerateOptions
from tests.support.services.up import (
    OUTRIDER,
    Up,
    addresses,
    alive,
    children,
    complete,
    run_outrider,
    running,
    service,
    until_attached,
    until_idle,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(400)

PROMPT = "The quick brown fox jumps over the lazy dog; "


def long_request(**changes: object) -> GenerateOptions:
    return GenerateOptions(
        **{"prompt": PROMPT, "max_tokens": 300, "temperature": 0.9, "seed": 4, **changes},
        ignore_eos=True,
        aux_info=True,
    )


async def test_proposer_killed_mid_stream_changes_no_text(draft_model_stack: Up) -> None:
    stack = draft_model_stack
    plain = await complete(stack.grpc, long_request(speculation=False), timeout_s=120)
    victim = stack.services["proposer_service"]

    def kill_midway(num_tokens: int) -> None:
        if num_tokens > 30 and alive(victim):
            os.kill(victim, signal.SIGKILL)

    # Others are under way at the same time, and must not notice either.
    hit, *others = await asyncio.gather(
        complete(stack.grpc, long_request(), timeout_s=200, on_tokens=kill_midway),
        *(complete(stack.grpc, long_request(), timeout_s=200) for _ in range(3)),
    )
    assert not alive(victim)
    assert {done.text for done in (hit, *others)} == {plain.text}

    await until_attached(stack.scorer, timeout_s=120)
    again = await complete(stack.grpc, long_request(), timeout_s=120)
    assert again.text == plain.text
    assert again.aux.accepted > 0, "speculation has resumed"
    assert stack.services["proposer_service"] != victim
    info = await until_idle(stack.scorer)
    assert info.free_pages == info.total_pages


async def test_client_that_leaves_frees_its_request(draft_model_stack: Up) -> None:
    first_tokens = asyncio.Event()
    call = asyncio.create_task(
        complete(
            draft_model_stack.grpc, long_request(), on_tokens=lambda n: n and first_tokens.set()
        )
    )
    await asyncio.wait_for(first_tokens.wait(), 60)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    info = await until_idle(draft_model_stack.scorer)
    assert info.free_pages == info.total_pages


async def test_serve_on_ctrl_c_stops_everything_in_two_seconds(pair: tuple[Path, Path]) -> None:
    with running("--model", pair[0], "--draft-model", pair[1]) as up:
        assert set(up.services) == {"scorer_service", "proposer_service", "gateway"}
        call = asyncio.create_task(complete(up.grpc, long_request()))  # not idle either
        await asyncio.sleep(0.3)
        seconds = await asyncio.to_thread(up.stop)
        await asyncio.gather(call, return_exceptions=True)
        assert up.process.returncode == 0
        assert up.process.stdout is not None
        assert up.process.stdout.read() == "", "one line on stdout: ready"
    assert seconds < 2.0


@pytest.mark.parametrize("stage", ["starting", "loading", "warming up"])
def test_serve_on_ctrl_c_while_loading_stops_everything(
    pair: tuple[Path, Path], stage: str
) -> None:
    argv = [*OUTRIDER, "serve", str(pair[0]), "--method", "none", "--port", "0"]
    argv += ["--grpc-port", "0"]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert any(stage in line for line in process.stderr), "the stage was reached"
        pids = children(process.pid)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        output = process.communicate(timeout=20)
    assert time.monotonic() - started < 2.0
    assert process.returncode == 130
    assert "Traceback" not in output[1]
    assert output[0] == ""
    assert not any(map(alive, pids))


def test_services_when_parent_is_killed_end(pair: tuple[Path, Path]) -> None:
    with running("--model", pair[0], "--method", "none") as up:
        pids = list(up.services.values())
        assert len(pids) == 2
        up.process.kill()
        up.process.wait(10)
        wait_until(lambda: not any(map(alive, pids)), 10, "orphans to end")


def test_services_when_parent_is_killed_while_loading_end(pair: tuple[Path, Path]) -> None:
    argv = [*OUTRIDER, "serve", str(pair[0]), "--method", "none", "--port", "0"]
    argv += ["--grpc-port", "0"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        # The scorer, before it imports torch.
        assert any(b"scorer   | starting" in line for line in process.stderr)
        pids = children(process.pid)
        assert pids
        process.kill()
    wait_until(lambda: not any(map(alive, pids)), 60, "orphans to end")


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_serve_on_taken_port_names_it_at_once(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = run_outrider("serve", "embedded", "--port", 0, "--grpc-port", 0, flag, port)
    assert "scorer   |" not in done.stderr, "before any service starts"
    assert done.returncode == 2
    assert str(port) in done.stderr
    assert flag in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_serve_with_draft_of_other_tokenizer_is_refused_at_once(pair: tuple[Path, Path]) -> None:
    done = run_outrider("demo", "--draft-model", pair[1])
    assert "scorer   |" not in done.stderr, "before any service starts"
    assert done.returncode == 2
    assert f"{pair[1]} has another tokenizer than" in done.stderr
    assert "--method ngram" in done.stderr.splitlines()[-1]


async def test_serve_with_draft_refused_by_scorer_hears_why(
    draft_model_stack: Up, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """What `serve` then does: test_cli_supervisor."""
    draft = shutil.copytree(pair[1], tmp_path / "draft")
    (draft / "tokenizer.json").unlink()
    flags = ("--scorer", draft_model_stack.scorer, "--method", "draft_model", "--model", draft)
    with service("proposer_service", *flags) as proposer:
        address = addresses(proposer)["grpc"]

        async def wait_for_proposer() -> None:
            while await why_not_attached(address, timeout_s=10):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

        with pytest.raises(ProposerRefusedError, match=r"tokenizer \(none\) is not the target's"):
            await asyncio.wait_for(wait_for_proposer(), 60)


def test_help_of_every_command_loads_no_engine() -> None:
    code = (
        "import sys, outrider.cli.command_line as command_line; command_line.build_parser(); "
        "print(bool({'torch', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "False\n"
    for name in ("scorer", "proposer", "gateway"):
        done = run_outrider(name, "--help")
        assert done.returncode == 0
        assert "--host" in done.stdout


def test_generate_against_stack_prints_text(draft_model_stack: Up) -> None:
    flags = ("--address", draft_model_stack.grpc, "--max-tokens", 16, "--temperature", 0)
    plain = run_outrider("generate", "hello world", *flags, "--speculation", "off")
    drafted = run_outrider("generate", "hello world", *flags, "--aux-info")
    assert (plain.returncode, drafted.returncode) == (0, 0)
    assert plain.stdout
    assert drafted.stdout.removesuffix("\n") == plain.stdout.removesuffix("\n")
    assert "avg_tokens_per_iter" in drafted.stderr

    wrong = run_outrider("generate", "hello", *flags, "--method", "magic")
    assert wrong.returncode == 1
    assert "method" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as tried:
        try:
            tried.bind(("::1", 0))
        except OSError:
            return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_services_on_ipv6_reach_each_other(pair: tuple[Path, Path]) -> None:
    here = ("--host", "::1", "--health-port", 0)
    model = ("--model", pair[0])
    with service("scorer_service", *here, *model, "--speculation-policy", "fixed") as scorer:
        scorer_address = addresses(scorer)["grpc"]
        met = (*here, "--scorer", scorer_address)
        with (
            service("proposer_service", *met, "--method", "ngram"),
            service("gateway", *met, *model, "--grpc-port", 0, "--http-port", 0) as gateway,
        ):
            await until_attached(scorer_address, 60)
            listening = addresses(gateway)
            answer = await complete(listening["grpc"], long_request(max_tokens=20))
            assert len(answer.token_ids) == 20
            health = f"{listening['http']}/health"
            assert (await asyncio.to_thread(urllib.request.urlopen, health, None, 20)).status == 200
