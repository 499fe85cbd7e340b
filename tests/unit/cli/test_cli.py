"""Flags, colours and the aux_info table."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from rich.console import Console

from outrider.cli import command_line
from outrider.cli.command_line import build_parser
from outrider.cli.demo import Run, verdict
from outrider.cli.process import run_until_signal
from outrider.cli.render import aux_table, legend, write_tokens
from outrider.errors import ConfigError
from outrider.offline.batch import main as batch
from outrider.train.command_line import main as train
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.support.services.up import OUTRIDER


class FakeGateway(generation_pb2_grpc.GenerationServiceServicer):
    """Says "Hello", and for the prompt "slow" nothing more until the client has gone."""

    def Generate(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generation_pb2.GenerateResponse]:
        gone = threading.Event()
        context.add_callback(gone.set)
        yield generation_pb2.GenerateResponse(text="Hello")
        if request.text == "slow":
            gone.wait(20)


@pytest.fixture
def gateway() -> Iterator[str]:
    """The address of one."""
    server = grpc.server(ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(FakeGateway(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"grpc://127.0.0.1:{port}"
    server.stop(None).wait(5)


def console(*, terminal: bool) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        color_system="standard" if terminal else None,
        width=100,
        _environ={},
    )


def written(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def token(text: str, kind: common_pb2.TokenKind.ValueType) -> generation_pb2.OutputToken:
    return generation_pb2.OutputToken(id=1, text=text, kind=kind)


def test_token_kinds_when_printed_have_own_colours() -> None:
    kinds = [
        common_pb2.TOKEN_KIND_ACCEPTED,
        common_pb2.TOKEN_KIND_BONUS,
        common_pb2.TOKEN_KIND_RECOVERED,
        common_pb2.TOKEN_KIND_PLAIN,
    ]
    styled = set()
    for kind in kinds:
        screen = console(terminal=True)
        write_tokens(screen, [token("x", kind)])
        styled.add(written(screen))
    assert len(styled) == len(kinds)


def test_text_with_control_characters_drives_no_terminal() -> None:
    screen = console(terminal=False)
    write_tokens(
        screen,
        [
            token("    if x:\n\t", common_pb2.TOKEN_KIND_PLAIN),
            token("日本 \x1b[2J[bold]", common_pb2.TOKEN_KIND_ACCEPTED),
        ],
    )
    assert written(screen) == "    if x:\n\t日本 �[2J[bold]"


def test_table_with_empty_rows_leaves_them_out() -> None:
    screen = console(terminal=False)
    drafted = common_pb2.AuxInfo(
        output_len=9, rounds=3, accepted_per_pos=[3, 2, 1], scorer_id="s", cost_time=12.345
    )
    drafted.by_method.add(method="ngram", drafted=8, accepted=6)
    screen.print(aux_table({"with": drafted, "without": common_pb2.AuxInfo(output_len=9)}))
    text = written(screen)
    assert "3 2 1" in text
    assert "ngram 6 of 8" in text
    assert "12.35" in text or "12.34" in text
    assert "preemptions" not in text
    assert [line.split() for line in text.splitlines() if "output_len" in line] == [
        ["output_len", "9", "9"]
    ]


def test_legend_of_tokens_counts_kinds() -> None:
    counts = Counter({common_pb2.TOKEN_KIND_ACCEPTED: 41, common_pb2.TOKEN_KIND_BONUS: 7})
    lines = legend(counts).plain.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["accepted", "41"],
        ["bonus", "7"],
        ["recovered", "0"],
        ["plain", "0"],
    ]


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "m", "--port", "70000"],
        ["serve", "m", "--num-speculative-tokens", "-1"],
        ["serve", "m", "--seed", "-1"],
        ["serve", "m", "--device", "tpu"],
        ["serve", "m", "--gpu-memory-utilization", "2"],
        ["serve", "m", "--dtype", "int8"],
        ["serve", "m", "--method", "magic"],
        ["serve", "m", "--method", "none,ngram"],
        ["generate", "--max-tokens", "0"],
        ["generate", "--temperature", "hot"],
        ["generate", "--timeout", "0"],
        ["generate", "--timeout", "nan"],
        ["generate", "--address", "http://127.0.0.1:8000"],
        ["generate", "\udcff"],
        ["generate", "--method", "\udcff"],
        ["demo", "--prompt", "\udcff"],
        ["demo", "--temperature", "2.1"],
        ["demo", "--prompt", ""],
        ["nothing"],
        [],
    ],
)
def test_command_with_wrong_flags_is_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        build_parser().parse_args(argv)


def test_command_with_unknown_flag_names_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["serve", "embedded", "--devices", "cuda"]) == 2
    told = "outrider: unrecognized arguments: --devices cuda (see outrider serve --help)\n"
    assert capsys.readouterr().err == told


def test_generate_without_gateway_reports_that_none_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command_line.main(["generate", "x", "--address", "unix:/nowhere.sock"]) == 1
    assert "no gateway answers at unix:/nowhere.sock: " in capsys.readouterr().err


def test_demo_of_no_tokens_asks_for_another_prompt() -> None:
    aux = common_pb2.AuxInfo()
    nothing = Run(text="", num_tokens=0, kinds=Counter(), ttft_s=0.1, total_s=0.1, aux=aux)
    screen = console(terminal=False)
    assert verdict(screen, nothing, nothing, exact=True) == 0
    assert "give another --prompt" in written(screen)


def test_address_from_ready_line_is_accepted() -> None:
    args = build_parser().parse_args(["generate", "x", "--address", "grpc://127.0.0.1:50051"])
    assert args.address == "127.0.0.1:50051"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # by the locale
def test_generate_with_binary_stdin_is_refused(
    errors: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", stdin)
    assert command_line.main(["generate"]) == 2
    assert "the prompt on stdin is not UTF-8 text" in capsys.readouterr().err


def test_generate_past_timeout_reports_it(gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "slow", "--address", gateway, "--timeout", "0.5"]
    assert command_line.main(argv) == 1
    assert "no complete answer within 0.5 s" in capsys.readouterr().err


def test_generate_with_closed_pipe_is_no_error(gateway: str) -> None:
    read, write = os.pipe()
    os.close(read)
    argv = [*OUTRIDER, "generate", "x", "--address", gateway]
    try:
        ended = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("command", ["scorer", "proposer", "gateway", "batch", "train"])
def test_command_of_one_service_passes_flags_unchanged(command: str) -> None:
    for flags in (["--help"], ["mtp", "--steps", "3"], ["--model", "m", "--help"]):
        args = build_parser().parse_args([command, *flags])
        assert (args.command, args.args) == (command, flags)


@pytest.mark.parametrize(
    ("command", "passed"), [("gateway", ["--host", "::", "--port=1"]), ("batch", ["--port=1"])]
)
def test_host_variable_when_set_precedes_flags_of_what_listens(
    command: str, passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[tuple[str, Sequence[str]]] = []
    monkeypatch.setattr(command_line, "run_module", lambda *call: run.append(call))
    monkeypatch.setenv("OUTRIDER_HOST", "::")
    assert command_line.main([command, "--port=1"]) is None
    assert run == [(command_line.MODULES[command], passed)]


@pytest.mark.parametrize(
    ("main", "name", "argv"),
    [
        (
            train,
            "outrider train",
            [*["medusa", "--target", "t", "--data", "d", "--out", "o"], "--two\nlines"],
        ),
        (command_line.main, "outrider", ["demo", "--two\nlines"]),
        (batch, "batch", ["-i", "two\nlines", "-o", "out", "--model", "embedded"]),
    ],
)
def test_refusal_of_an_argument_with_a_line_break_is_one_line(
    main: Callable[[Sequence[str]], int],
    name: str,
    argv: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{name}: ")
    assert said.count("\n") == 1


def test_serve_at_an_empty_host_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["serve", "embedded", "--dry-run", "--host", ""]) == 2
    assert capsys.readouterr().err == "outrider: argument --host: must not be empty\n"


@pytest.mark.parametrize(("before", "code"), [(signal.SIG_IGN, 3), (signal.SIG_DFL, 129)])
def test_command_under_nohup_outlives_its_terminal(before: signal.Handlers, code: int) -> None:
    async def command() -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.1)
        return 3

    former = signal.signal(signal.SIGHUP, before)
    try:
        assert run_until_signal(command()) == code
    finally:
        signal.signal(signal.SIGHUP, former)
