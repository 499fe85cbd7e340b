"""What `outrider serve` makes of its flags and of the models' files."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from outrider import engines
from outrider.cli import serve, serve_config
from outrider.cli.command_line import build_parser, main
from outrider.cli.serve import ready_line
from outrider.cli.serve_config import count_gpus, take_config
from outrider.cli.serve_flags import PASSED
from outrider.cli.services import ServeConfig, services
from outrider.drafting.building.flags import add_method_flags
from outrider.drafting.hidden_states.heads import mtp_formats
from outrider.errors import ConfigError
from outrider.methods import METHODS
from outrider.models import facts
from outrider.process.child_process import ServiceSpec


class Said(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs."""
    monkeypatch.setattr(serve_config, "count_gpus", lambda: 2)


def config(*flags: object, say: Said | None = None, dry: bool = False) -> ServeConfig:
    args = build_parser().parse_args(["serve", *map(str, flags)])
    return take_config(args, say if say is not None else Said(), dry=dry)


def checkpoint(folder: Path, tensors: tuple[str, ...] = ("x",), **fields: object) -> Path:
    folder.mkdir()
    fields = {"architectures": ["LlamaForCausalLM"], **fields}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({name: np.zeros(1) for name in tensors}, folder / "model.safetensors")
    return folder


def named(specs: tuple[ServiceSpec, ...]) -> dict[str, ServiceSpec]:
    return {spec.name: spec for spec in specs}


def value(spec: ServiceSpec, flag: str) -> str | None:
    return spec.argv[spec.argv.index(flag) + 1] if flag in spec.argv else None


def test_command_line_without_a_command_shows_all_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("serve", "demo", "generate", "batch", "train"))


def test_gpus_are_counted_as_torch_counts_them() -> None:
    assert count_gpus() == torch.cuda.device_count()


def test_embedded_model_is_drafted_for_by_its_draft_model() -> None:
    said = Said()
    served = config("embedded", say=said)
    assert (served.methods, served.device, served.draft_device) == (("draft_model",), "cpu", None)
    assert (served.dtype, served.served_model_name) == ("float32", "default")
    assert any("float32" in line for line in said)
    specs = named(services(served, "/run"))
    assert list(specs) == ["scorer", "gateway"], "the scorer drafts"
    assert value(specs["scorer"], "--port") == "0"
    assert value(specs["gateway"], "--scorer") == f"unix:{value(specs['scorer'], '--listen-unix')}"
    drafting = value(specs["scorer"], "--in-process-proposer")
    assert drafting == "--method draft_model --model embedded --dtype float32"
    assert config("--model", "embedded").methods == ("draft_model",)
    assert config("embedded", "--method", "none").methods == ()


def test_model_with_prediction_module_drafts_by_it(tmp_path: Path) -> None:
    layer = "model.layers.3.enorm.weight"
    folder = checkpoint(tmp_path / "v3", ("x", layer), model_type="deepseek_v3")
    served = config(folder)
    assert (served.methods, served.draft_model) == (("mtp",), str(folder))
    assert config(folder, "--method", "mtp").draft_model == str(folder)
    assert config(folder, "--method", "ngram").methods == ("ngram",)
    without = checkpoint(tmp_path / "cut", ("x",), model_type="deepseek_v3")
    said = Said()
    assert config(without, say=said).methods == ("ngram",)
    assert any("prompt lookup" in line for line in said)
    assert config(without).served_model_name == str(without)


def test_module_formats_for_targets_are_those_that_can_draft() -> None:
    known = {kind: stored.name for stored in mtp_formats._FORMATS for kind in stored.families}
    assert {kind: each for kind, each in known.items() if each != "RTP-LLM"} == facts._MTP_TARGETS


@pytest.mark.parametrize(
    ("name", "fields", "method"),
    [
        ("any", {"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ("any", {"speculators_model_type": "eagle3"}, "eagle3"),
        ("EAGLE-LLaMA3.1-Instruct-8B", {"architectures": ["LlamaForCausalLM"]}, "eagle"),
        ("any", {"medusa_num_heads": 4}, "medusa"),
        ("any", {"architectures": ["MLPSpeculatorPreTrainedModel"]}, "mlp_speculator"),
        ("any", {"architectures": ["Qwen3_5MTP"]}, "mtp"),
        ("opt-125m", {"architectures": ["OPTForCausalLM"]}, "draft_model"),
    ],
)
def test_method_for_draft_follows_from_its_checkpoint(
    tmp_path: Path, name: str, fields: dict[str, object], method: str
) -> None:
    target = checkpoint(tmp_path / "target")
    draft = checkpoint(tmp_path / name, **fields)
    assert config(target, "--draft-model", draft).methods == (method,)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("ibm-fms/llama3-70b-accelerator", "mlp_speculator"),
        ("facebook/opt-125m", "draft_model"),
    ],
)
def test_method_for_draft_to_be_downloaded_follows_from_its_name(name: str, method: str) -> None:
    said = Said()
    served = config("a/b", "--draft-model", name, dry=True, say=said)
    assert (served.model, served.methods, served.draft_model) == ("a/b", (method,), name)
    assert sum("is not on this machine" in line for line in said) == 2


@pytest.mark.parametrize(
    ("flags", "weights"), [((), "safetensors"), (("--method", "eagle3"), "bin")]
)
def test_models_that_are_not_here_are_downloaded_once(
    tmp_path: Path, flags: tuple[str, ...], weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The services get the folders; heads are published with other files than models."""
    asked: dict[str, list[str]] = {}

    def download(name: str, allow_patterns: list[str], **_: object) -> str:
        asked.setdefault(name, []).append(" ".join(allow_patterns))
        folder = tmp_path / Path(name).name
        return str(folder if folder.exists() else checkpoint(folder))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    said = Said()
    served = config("gpt2", "--draft-model", "a/small", *flags, say=said)
    assert (served.model, served.draft_model) == (str(tmp_path / "gpt2"), str(tmp_path / "small"))
    assert served.served_model_name == "gpt2"
    assert "*.bin" not in asked["gpt2"][-1]
    assert f"*.{weights}" in asked["a/small"][-1]
    assert ("*.bin" in asked["a/small"][-1]) == (weights == "bin")
    assert any("downloading" in line for line in said)
    assert config("gpt2", dry=True).model == "gpt2"


@pytest.mark.usefixtures("gpus")
def test_dtype_on_gpu_is_the_checkpoints(tmp_path: Path) -> None:
    half = checkpoint(tmp_path / "half", torch_dtype="float16")
    nested = checkpoint(tmp_path / "nested", text_config={"dtype": "bfloat16"})
    assert (config(half).device, config(half).dtype) == ("cuda", "float16")
    assert config(nested).dtype == "bfloat16"
    assert config(nested, "--dtype", "float32").dtype == "float32"
    assert config(nested, "--device", "cpu").dtype == "float32"


@pytest.mark.usefixtures("gpus")
def test_draft_device_starts_a_proposer_that_sees_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    served = config("embedded", "--method", "eagle3", "--draft-device", "cuda:1")
    scorer, proposer, _ = services(served, "/run")
    assert proposer.optional
    assert dict(proposer.env) == {"CUDA_VISIBLE_DEVICES": "6"}
    assert value(proposer, "--device") == "cuda"
    assert value(proposer, "--target-model") == "embedded"
    assert value(proposer, "--scorer") == f"unix:{value(scorer, '--listen-unix')}"
    assert value(scorer, "--hidden-features") == "2,4,7"
    assert "--in-process-proposer" not in scorer.argv
    assert "CUDA_VISIBLE_DEVICES=6" in str(proposer)
    for device in ("cuda", "cuda:0"):
        with pytest.raises(ConfigError, match="is the model's own"):
            config("embedded", "--draft-device", device)


@pytest.mark.parametrize(
    ("fields", "features"),
    [
        ({}, "eagle3"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, "2,4,8"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, "2,4,6"),
    ],
)
def test_scorer_flags_for_module_keep_its_hidden_states(
    tmp_path: Path, fields: dict[str, object], features: str
) -> None:
    target, draft = checkpoint(tmp_path / "target"), checkpoint(tmp_path / "head", **fields)
    flags = ("--method", "ngram,eagle3", "--draft-model", draft, "--draft-device", "cpu")
    specs = named(services(config(target, *flags), "/run"))
    assert value(specs["scorer"], "--hidden-features") == features
    assert value(specs["proposer"], "--model") == str(draft)
    assert value(specs["proposer"], "--target-model") == str(target)


@pytest.fixture
def vllm_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda _: object())


@pytest.mark.usefixtures("gpus", "vllm_installed")
def test_proposer_may_share_one_of_vllms_devices(tmp_path: Path) -> None:
    target, draft = (checkpoint(tmp_path / name, dtype="bfloat16") for name in "td")
    flags = ("--draft-model", draft, "--draft-device", "cuda:1", "--tensor-parallel-size", 2)
    scorer, proposer, _ = services(config(target, "--engine", "vllm", *flags), "/run")
    assert dict(proposer.env) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert value(proposer, "--model") == str(draft)
    assert "--speculative-config" not in scorer.argv


@pytest.mark.usefixtures("gpus", "vllm_installed")
def test_draft_on_vllms_only_device_is_made_in_its_worker(tmp_path: Path) -> None:
    target, draft = (checkpoint(tmp_path / name, dtype="bfloat16") for name in "td")
    flags = ("--engine", "vllm", "--draft-model", draft, "--draft-device", "cuda:0")
    scorer, *others = services(config(target, *flags), "/run")
    assert [each.name for each in others] == ["gateway"]
    assert f"--model {draft}" in (value(scorer, "--in-process-proposer") or "")
    assert scorer.argv[-2:] == ("--", "--async-scheduling")
    in_turns = replace(config(target, *flags), vllm_flags=("--no-async-scheduling",))
    assert services(in_turns, "/run")[0].argv[-1] == "--no-async-scheduling"
    nobody = services(config(target, *flags[:2], *flags[4:], "--method", "none"), "/run")
    assert nobody[0].argv[-1] == "--", "nothing of drafts"


@pytest.mark.usefixtures("vllm_installed")
@pytest.mark.parametrize(
    ("num_gpus", "flags", "where"),
    [
        (0, ("--method", "dspark"), "cpu"),  # vLLM knows no such head
        (1, ("--method", "dspark"), "cuda"),
        (2, ("--method", "dspark"), "cuda"),
        (1, ("--method", "eagle3"), None),
        (2, ("--method", "eagle3"), None),
        (1, ("--method", "draft_model"), "cuda"),  # vLLM's own is slower than no draft
        (2, ("--method", "draft_model"), "cuda:1"),
        (1, ("--method", "ngram,draft_model"), "cuda"),
        (2, ("--method", "draft_model", "--tensor-parallel-size", 2), None),
        (2, ("--method", "draft_model", "--device", "cuda:1"), "cuda:0"),
    ],
)
def test_draft_of_vllms_lies_where_it_is_fast(
    num_gpus: int,
    flags: tuple[object, ...],
    where: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_config, "count_gpus", lambda: num_gpus)
    target, draft = (checkpoint(tmp_path / name, dtype="bfloat16") for name in "td")
    served = config(target, "--engine", "vllm", "--draft-model", draft, *flags)
    assert served.draft_device == where


@pytest.mark.usefixtures("gpus", "vllm_installed")
def test_several_devices_are_vllms_in_one_scorer(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", dtype="bfloat16")
    specs = named(services(config(folder, "--tensor-parallel-size", 2), "/run"))
    assert list(specs) == ["scorer", "proposer", "gateway"]
    argv = specs["scorer"].argv
    assert value(specs["scorer"], "--engine") == "vllm"
    assert value(specs["proposer"], "--method") == "ngram"
    assert argv[argv.index("--") :][1:3] == ("--tensor-parallel-size", "2")
    with pytest.raises(ConfigError, match="this machine has 2 GPUs"):
        config(folder, "--tensor-parallel-size", 4)
    with pytest.raises(ConfigError, match="outrider scorer"):
        config(folder, "--tensor-parallel-size", 2, "--nnodes", 2, "--node-rank", 1)


def test_flags_of_vllm_for_the_native_engine_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--nnodes 2: flags of vLLM need --engine vllm"):
        config(checkpoint(tmp_path / "m"), "--device", "cpu", "--nnodes", 2)


@pytest.mark.usefixtures("gpus")
def test_several_devices_without_vllm_name_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip install"):
        config(checkpoint(tmp_path / "m", dtype="bfloat16"), "--tensor-parallel-size", 2)


@pytest.mark.usefixtures("vllm_installed")
def test_methods_of_vllm_become_its_own_speculation(tmp_path: Path) -> None:
    folder, head = checkpoint(tmp_path / "m"), checkpoint(tmp_path / "eagle3-head")

    def speculation(*flags: object) -> dict[str, object]:
        argv = services(config(folder, "--engine", "vllm", *flags), "/run")[0].argv
        assert argv[argv.index("--num-speculative-tokens") + 1] == "0"
        return dict(json.loads(argv[argv.index("--speculative-config") + 1]))

    read = speculation("--draft-model", head, "--num-speculative-tokens", 3)
    assert read == {"method": "eagle3", "num_speculative_tokens": 3, "model": str(head)}
    for off in (("--method", "none"), ("--num-speculative-tokens", 0)):
        scorer, *others = services(config(folder, "--engine", "vllm", *off), "/run")
        assert scorer.argv[-1] == "--"
        assert [each.name for each in others] == ["gateway"], "no proposer would be taken"
    beside = ("--draft-model", head, "--draft-device", "cpu")
    scorer, proposer, _ = services(config(folder, "--engine", "vllm", *beside), "/run")
    assert value(scorer, "--hidden-features") == "eagle3"
    assert value(proposer, "--method") == "eagle3"
    with pytest.raises(ConfigError, match="--tree-width is not for vLLM's own eagle3"):
        config(folder, "--engine", "vllm", "--draft-model", head, "--tree-width", 2)


def test_number_of_draft_tokens_goes_to_whoever_heeds_it() -> None:
    def numbers(*flags: object) -> tuple[str | None, bool]:
        scorer = services(config("embedded", *flags), "/run")[0]
        return (
            value(scorer, "--num-speculative-tokens"),
            "--max-draft-tokens" in (value(scorer, "--in-process-proposer") or ""),
        )

    assert numbers() == (None, False)
    assert numbers("--num-speculative-tokens", 6) == ("6", False)
    assert numbers("--num-speculative-tokens", 20) == ("20", True)
    assert numbers("--method", "suffix", "--num-speculative-tokens", 15) == (None, True)
    assert numbers("--method", "suffix,ngram", "--num-speculative-tokens", 15) == ("15", True)


def test_passed_flags_are_flags_of_their_services() -> None:
    import argparse

    from gateway.__main__ import _parser
    from scorer_service.__main__ import parser

    draft = argparse.ArgumentParser()
    add_method_flags(draft, "cpu")
    parsers = {"scorer": parser(), "gateway": _parser(), "draft": draft}
    for flag in PASSED:
        known = parsers[flag.service]._option_string_actions
        assert f"--{flag.theirs or flag.name}" in known
    served = config("embedded", "--max-num-seqs", 8, "--seed", 3, "--draft-max-model-len", 64)
    assert served.flags == {
        "scorer": ("--max-num-seqs", "8"),
        "gateway": ("--seed", "3"),
        "draft": ("--max-model-len", "64"),
    }
    assert config("embedded", "--no-enable-prefix-caching", "--no-playground").flags == {
        "scorer": ("--no-enable-prefix-caching",),
        "gateway": ("--no-playground",),
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "no model was given"),
        (("a", "--model", "b"), "two models"),
        (("scorer",), "by `outrider scorer`"),
        (("/nowhere/model",), "no model folder /nowhere/model"),
        (("embedded", "--draft-model", "./nothing"), "no model folder nothing"),
        (("embedded", "--method", "eagle"), "--method eagle needs --draft-model"),
        (("TARGET", "--method", "mtp"), "--method mtp needs --draft-model"),
        (("TARGET", "--method", "draft_model"), "--method draft_model needs --draft-model"),
        (
            ("TARGET", "--method", "ngram", "--draft-model", "TARGET"),
            "of no use with --method ngram",
        ),
    ],
)
def test_command_that_cannot_work_is_refused_before_any_start(
    tmp_path: Path, flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(checkpoint(tmp_path / "target"))
    argv = [target if word == "TARGET" else word for word in flags]
    assert main(["serve", "--port", "0", "--grpc-port", "0", *argv]) == 2
    assert message in capsys.readouterr().err


def test_dry_run_prints_commands_as_a_shell_takes_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "embedded", "--dry-run", "--port", "1"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["scorer:", "gateway:"]
    assert lines[1][lines[1].index("--http-port") + 1] == "1"


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ("nan", "must lie between 0 and 1"),
        ("-0.1", "must lie between 0 and 1"),
        ("0.9,-0.1,0,0", "must lie between 0 and 1"),
        ("0.1,0.2,0,0", "must not rise"),
        ("0.9,0.6", "one rate for each of 4 draft tokens"),
        ("abc", "'abc' is no list of numbers"),
        ("", "'' is no list of numbers"),
        (",,,", "',,,' is no list of numbers"),
    ],
)
def test_synthetic_rates_that_the_scorer_refuses_are_refused_in_its_words(
    rates: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from scorer_service.__main__ import main as scorer

    flag = f"--synthetic-acceptance-rates={rates}"
    key = f"--speculative-config={json.dumps({'synthetic_acceptance_rates': rates})}"
    assert message in refusal(main, ["serve", "embedded", "--dry-run", flag], capsys)
    assert message in refusal(main, ["serve", "embedded", "--dry-run", key], capsys)
    assert message in refusal(scorer, ["--device", "cpu", flag], capsys)


@pytest.mark.parametrize("length", ["0.9", "5.1", "nan", "inf", "-1"])
def test_synthetic_length_out_of_bounds_is_refused(
    length: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from scorer_service.__main__ import main as scorer

    flag = f"--synthetic-acceptance-length={length}"
    for run, argv in ((main, ["serve", "embedded", "--dry-run"]), (scorer, ["--device", "cpu"])):
        assert "must lie between 1 and 5" in refusal(run, [*argv, flag], capsys)
        both = [*argv, flag, "--synthetic-acceptance-rates=1,1,1,1"]
        assert "say the same: give one" in refusal(run, both, capsys)


def refusal(
    run: Callable[[Sequence[str]], int],
    argv: Sequence[str],
    capsys: pytest.CaptureFixture[str],
) -> str:
    """Return what a command that ends with exit code 2 says on stderr."""
    code = run(argv)
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    return said.err


def test_synthetic_rates_need_drafts_of_the_scorers_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rates = "--synthetic-acceptance-rates=0.9,0.6"
    words = ["serve", "embedded", "--device", "cpu", "--dry-run", "--num-speculative-tokens", "2"]
    assert main([*words, rates]) == 0
    said = capsys.readouterr()
    assert "--synthetic-acceptance-rates 0.9,0.6" in said.out
    assert "dtype float32, as on any CPU" in said.err
    assert "the text is the same" not in said.err
    assert main([*words, "--synthetic-acceptance-length=2.5"]) == 0
    assert "--synthetic-acceptance-length 2.5" in capsys.readouterr().out
    assert main(words) == 0
    assert "the text is the same" in capsys.readouterr().err
    assert "there are none" in refusal(main, [*words, rates, "--method", "none"], capsys)
    limited = refusal(main, [*words, rates, "--method", "suffix"], capsys)
    assert "one rate for each of 4" in limited  # whose K the scorer is not told


@pytest.mark.usefixtures("vllm_installed")
def test_synthetic_rates_where_vllm_serves_name_its_own_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from scorer_service.__main__ import main as scorer

    folder = str(checkpoint(tmp_path / "m"))
    rates = ["--engine", "vllm", "--synthetic-acceptance-rates", "0.9,0.6"]
    for run, argv in ((main, ["serve", folder, "--dry-run"]), (scorer, ["--model", folder])):
        said = refusal(run, [*argv, *rates], capsys)
        assert "is for --engine native: give vLLM's keys after --" in said


@pytest.mark.parametrize("beside", [[], ["--draft-device", "cpu"]])
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--draft-quantization", "x"], "argument --draft-quantization: invalid choice"),
        (["--draft-max-model-len", "1"], "(exit code 2): --draft-max-model-len is at least 2"),
        (
            ["--method", "ngram", "--prompt-lookup-min", "5"],
            "(exit code 2): --prompt-lookup-min must be at least 1, at most --prompt-lookup-max",
        ),
    ],
)
def test_flag_that_a_drafting_service_refuses_has_the_name_that_serve_gives_it(
    flags: list[str], beside: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["serve", "embedded", "--device", "cpu", "--port", "0", "--grpc-port", "0"]
    said = refusal(main, [*argv, *flags, *beside], capsys)
    assert told in said.splitlines()[-1]
    assert "--in-process-proposer" not in said.splitlines()[-1]


def test_ready_line_says_where_what_and_how() -> None:
    served = ServeConfig(served_model_name="m", methods=("ngram",), draft_device="cpu")
    line = ready_line(
        served,
        {
            "gateway": {"http": "http://h:1", "grpc": "h:2"},
            "scorer": {"context": "2048", "cache": "32768"},
        },
    )
    assert line == (
        "ready http://h:1 grpc://h:2 model=m engine=native float32 on cpu, method=ngram on cpu, "
        "context=2048 cache=32768 tokens"
    )


def test_threads_of_embedded_model_are_two_and_of_others_the_cores(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    other = services(config(checkpoint(tmp_path / "m")), "/run")[0]
    assert value(services(config("embedded"), "/run")[0], "--threads") == "2"
    assert value(other, "--threads") == str(cores if cores <= 4 else cores // 2)


@pytest.mark.parametrize("in_memory", [None, "/proc/no/such", "/proc"])
def test_folder_of_sockets_that_cannot_be_made_is_refused(
    in_memory: str | None, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "memory_folder", lambda: in_memory)
    monkeypatch.setattr(serve, "temporary_folder", lambda: str(socket_folder))
    with serve.stack_of(config("embedded")):
        (folder,) = socket_folder.iterdir()
    assert not folder.exists()
    long = socket_folder / ("x" * 90)
    long.mkdir()
    for parent, told in (
        (long, "TMPDIR .* at most 63 bytes"),
        ("/proc", "/proc"),
    ):
        monkeypatch.setattr(serve, "temporary_folder", lambda parent=parent: str(parent))
        with pytest.raises(ConfigError, match=told), serve.stack_of(config("embedded")):
            pass
    assert not list(long.iterdir())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("beside", [(), ("--draft-device", "cpu")])
def test_no_draft_tokens_are_no_drafts_by_any_method(method: str, beside: tuple[str, ...]) -> None:
    specs = services(
        config("embedded", "--num-speculative-tokens", 0, "--method", method, *beside), "/run"
    )
    assert [spec.name for spec in specs] == ["scorer", "gateway"]
    assert value(specs[0], "--num-speculative-tokens") == "0"
    assert "--in-process-proposer" not in specs[0].argv
