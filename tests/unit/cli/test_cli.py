"""Flags, colours and the aux_info table."""

from __future__ import annotations

import io
import json
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from rich.console import Console

from outrider.cli import command_line
from outrider.cli.command_line import build_parser
from outrider.cli.demo import Run, verdict
from outrider.cli.render import aux_table, legend, write_tokens
from outrider.cli.specs import StackConfig, proposer_spec, scorer_spec
from outrider.cli.up import stack_config
from outrider.errors import ConfigError
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


def test_token_kinds_have_own_colours() -> None:
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


def test_method_when_unset_is_chosen_from_flags(capsys: pytest.CaptureFixture[str]) -> None:
    parse = build_parser().parse_args
    assert stack_config(parse(["up"])).methods == ("draft_model",)
    assert stack_config(parse(["up", "--model", "embedded"])).model is None
    models = ["--model", "m", "--draft-model", "d"]
    assert stack_config(parse(["up", *models])).methods == ("draft_model",)
    assert stack_config(parse(["up", "--method", "none"])).methods == ()
    renamed = ["up", "--method", "inference_with_reference"]
    assert stack_config(parse(renamed)).methods == ("ngram",)
    several = ["--method", "suffix,draft_model"]
    assert stack_config(parse(["up", *models, *several])).methods == ("suffix", "draft_model")
    assert stack_config(parse(["up", "--model", "m"])).methods == ("ngram",)
    assert "--method ngram" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--draft-model"):
        stack_config(parse(["up", "--model", "m", "--method", "draft_model"]))


@pytest.mark.parametrize(
    ("config", "features"),
    [
        ({}, "eagle3"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, "2,4,8"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, "2,4,6"),
        (None, "eagle3"),  # to be downloaded
    ],
)
def test_scorer_flags_for_module_keep_its_hidden_states(
    tmp_path: Path, config: dict[str, object] | None, features: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    stack = StackConfig(
        model="target", draft_model=str(tmp_path), methods=("ngram", "eagle3"), dtype="bfloat16"
    )
    scorer, proposer = scorer_spec(stack, 1, "s").argv, proposer_spec(stack, "s:1").argv
    assert scorer[scorer.index("--hidden-features") + 1] == features
    assert proposer[proposer.index("--model") + 1] == str(tmp_path)
    assert proposer[proposer.index("--target-model") + 1] == "target"
    plain = scorer_spec(StackConfig(), 1, "s").argv
    assert "--hidden-features" not in plain
    medusa = StackConfig(draft_model="heads", methods=("medusa",))
    assert scorer_spec(medusa, 1, "s").argv[-2:] == ("--hidden-features", "final")


def test_module_without_path_or_embedded_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="--method eagle needs --draft-model"):
        StackConfig(methods=("eagle",))
    with pytest.raises(ConfigError, match="--method mtp needs --draft-model"):
        StackConfig(model="target", methods=("mtp",))


def test_embedded_module_needs_no_flags() -> None:
    for method, features in (("eagle3", "2,4,7"), ("mtp", "final"), ("medusa", "final")):
        stack = StackConfig(methods=(method,))
        assert scorer_spec(stack, 1, "s").argv[-2:] == ("--hidden-features", features)
        argv = proposer_spec(stack, "s:1").argv
        assert argv[-4:] == ("--model", "embedded", "--target-model", "embedded")


@pytest.mark.parametrize(
    "argv",
    [
        ["up", "--http-port", "70000"],
        ["up", "--num-speculative-tokens", "-1"],
        ["up", "--seed", "-1"],
        ["up", "--dtype", "int8"],
        ["up", "--method", "magic"],
        ["up", "--method", "none,ngram"],
        ["generate", "--max-tokens", "0"],
        ["generate", "--temperature", "hot"],
        ["generate", "--top-k", "-1"],
        ["generate", "--top-k", "4294967296"],
        ["generate", "--timeout", "0"],
        ["generate", "--timeout", "nan"],
        ["generate", "--address", "http://127.0.0.1:8000"],
        ["generate", "\udcff"],
        ["generate", "--stop", "\udcff"],
        ["demo", "--prompt", "\udcff"],
        ["demo", "--temperature", "2.1"],
        ["demo", "--prompt", ""],
        ["serve", "nobody"],
        ["nothing"],
        [],
    ],
)
def test_command_with_wrong_flags_exits_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(argv)
    assert caught.value.code == 2
    assert "usage: outrider" in capsys.readouterr().err


def test_command_with_unknown_flag_names_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line.main(["up", "--device", "cuda"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "usage: outrider up" in said
    assert "outrider up: error: unrecognized arguments: --device cuda" in said


def test_generate_without_gateway_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command_line.main(["generate", "x", "--address", "unix:/nowhere.sock"]) == 1
    assert "no gateway answers there" in capsys.readouterr().err


def test_demo_of_no_tokens_says_so() -> None:
    aux = common_pb2.AuxInfo()
    nothing = Run(text="", num_tokens=0, kinds=Counter(), ttft_s=0.1, total_s=0.1, aux=aux)
    screen = console(terminal=False)
    assert verdict(screen, nothing, nothing, exact=True) == 0
    assert "give another --prompt" in written(screen)


def test_address_from_ready_line_is_accepted() -> None:
    args = build_parser().parse_args(["generate", "x", "--address", "grpc://127.0.0.1:50051"])
    assert args.address == "127.0.0.1:50051"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # by the locale
def test_generate_with_binary_stdin_says_so(
    errors: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", stdin)
    assert command_line.main(["generate"]) == 2
    assert "the prompt on stdin is not UTF-8 text" in capsys.readouterr().err


def test_generate_past_timeout_says_so(gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_service_command_passes_flags_unchanged(tmp_path: Path) -> None:
    args = build_parser().parse_args(["serve", "scorer", "--model", str(tmp_path), "--help"])
    assert args.service == "scorer"
    assert args.args == ["--model", str(tmp_path), "--help"]


def test_train_command_passes_flags_unchanged() -> None:
    args = build_parser().parse_args(["train", "--help"])
    assert (args.command, args.args) == ("train", ["--help"])
    args = build_parser().parse_args(["train", "mtp", "--steps", "3"])
    assert args.args == ["mtp", "--steps", "3"]
