"""Training of every method on a tiny target: it learns, and the product reads what it wrote."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.lib.replay import record
from outrider.drafting.drafters import DraftInput
from outrider.drafting.hidden_states.checkpoints import TargetTensors
from outrider.drafting.hidden_states.heads.dflash import DFlashHead
from outrider.drafting.hidden_states.trees import TargetDraws
from outrider.engine.batch import RowSlice, pack
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.attention_backends import choose_backend
from outrider.engine.model.loader import ModelOptions, load_model
from outrider.features import FeatureSpec
from outrider.params import SamplingParams
from outrider.train.command_line import build_parser, main
from outrider.train.data import Source, Windows
from outrider.train.files import round_module
from outrider.train.processes import Processes
from outrider.train.run import BYTES_PER_LOGIT, build_head, tokens_per_forward
from outrider.train.target import Target, TargetBatch, load_target
from outrider.train.trainer import Progress, TrainConfig, Trainer
from tests.support.checkpoints.loading import (
    load_dflash,
    load_dspark,
    load_eagle3,
    load_medusa,
    load_mlp_speculator,
    load_mtp,
)
from tests.support.checkpoints.train import (
    OTHERS,
    process_environment,
    save_other_target,
    save_target,
    save_text,
)
from tests.support.ports import reserved_port

CPU = torch.device("cpu")
STEPS = 3
"""Drafted tokens of a chain."""
SHORT, FOREIGN, NEGATIVE = "short.npy", "foreign.npy", "negative.npy"
NARROW = "narrow.npy"
METHODS = {
    "eagle3": "--hidden-size 32 --intermediate-size 48",
    "eagle3 narrow": "--hidden-size 16 --heads 2 --kv-heads 1 --head-dim 16 "
    "--draft-vocab-size 128 --mantissa-bits 4",
    "dflash": "--intermediate-size 48 --num-layers 2",
    "dflash narrow": "--intermediate-size 48 --num-layers 1 --draft-vocab-size 128 "
    "--mantissa-bits 4",
    "dspark": "--intermediate-size 48 --num-layers 2 --markov-rank 16",
    "dspark narrow": "--intermediate-size 48 --num-layers 1 --draft-vocab-size 128 "
    "--markov-rank 8 --mantissa-bits 4",
    "mtp": "--intermediate-size 48",
    "medusa": "",
    "mlp_speculator": "--inner-size 16",
    "draft_model": "--hidden-size 16 --heads 2 --kv-heads 1",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train")
    save_target(path / "target")
    save_text(path / "text.npy")
    return path


def flags(case: str, folder: Path, *more: str) -> list[str]:
    method = case.split()[0]
    common = ["--target", str(folder / "target"), "--data", str(folder / "text.npy")]
    common += ["--out", str(folder / case.replace(" ", "_")), "--length", "24"]
    common += [
        "--lr",
        "0.03",
        "--table-lr",
        "0.03",
        "--tokens-per-step",
        "96",
        "--num-draft-tokens",
        str(STEPS),
    ]
    common += ["--prompt-length", "16", "--new-tokens", "32", "--eval-rows", "4"]
    return [method, *common, *METHODS[case].split(), *more]


@pytest.fixture(scope="module", params=METHODS)
def trained(request: pytest.FixtureRequest, folder: Path) -> tuple[str, Path]:
    """A checkpoint of each method after a few steps."""
    case: str = request.param
    assert main(flags(case, folder, "--steps", "20")) == 0
    return case, folder / case.replace(" ", "_")


def parsed(case: str, folder: Path) -> Any:
    return build_parser().parse_args(flags(case, folder, "--steps", "20"))


def fresh_head(case: str, folder: Path) -> tuple[Any, Target]:
    target = load_target(folder / "target", CPU, torch.float32)
    arrays = [np.load(folder / "text.npy")]
    torch.manual_seed(0)
    args = parsed(case, folder)
    # The command holds the last windows out before it counts tokens.
    return build_head(args, target, [arrays[0][: -max(len(arrays[0]) // 50, 50)]]), target


def written_head(case: str, folder: Path, out: Path) -> tuple[Any, Target]:
    """The module with the values that were written."""
    head, target = fresh_head(case, folder)
    head.load_state_dict(torch.load(out / "state.pt")["head"])
    round_module(head, 4 if "narrow" in case else 7)
    return head, target


def as_sent(batch: TargetBatch) -> TargetBatch:
    """States travel as bfloat16."""
    layers, hidden = batch.layers.bfloat16().float(), batch.hidden.bfloat16().float()
    return replace(batch, layers=layers, hidden=hidden)


def product_chain(
    case: str, folder: Path, out: Path, batch: TargetBatch, base: int
) -> list[Tensor]:
    """Logits of one chain by the proposer's head, the text's tokens standing for drafts."""
    where, tokens = (out, folder / "target"), batch.token_ids[0].tolist()
    if case == "medusa":
        medusa = load_medusa(*where, dtype=torch.float32, device=CPU)
        return [medusa.logits(batch.hidden[0, base : base + 1], i)[0] for i in range(STEPS)]
    if case == "mlp_speculator":
        mlp = load_mlp_speculator(*where, dtype=torch.float32, device=CPU)
        state, found = mlp.begin(batch.hidden[0, base : base + 1]), []
        for i in range(STEPS):
            state, logits = mlp.step(state, batch.token_ids[0, base + 1 + i : base + 2 + i], i)
            found.append(logits[0])
        return found
    if case.startswith(("dflash", "dspark")):
        load = load_dflash if case.startswith("dflash") else load_dspark
        return product_block(load(*where, torch.float32, CPU), batch, base)
    head: Any
    if case == "mtp":
        head, features = load_mtp(*where, torch.float32, CPU), batch.hidden[0]
    else:
        head, features = load_eagle3(*where, torch.float32, CPU), batch.layers[0]
    assert head.features.width == features.shape[-1]
    pools = KVPools(16, 4, torch.float32, CPU)
    backend = choose_backend(None, head.attention_traits(), CPU)
    head.bind(pools)

    def feed(states: Tensor, start: int, stop: int, step: int) -> Tensor:
        row = RowSlice(tokens[start + 1 : stop + 1], start, list(range(1, 12)), stop - start)
        packed = pack([row], 4, CPU)
        output: Tensor = head.forward(packed.input_ids, states, backend(packed), step)
        return output

    output = feed(head.begin(features[: base + 1].bfloat16()), 0, base + 1, 0)[-1:]
    found = [head.logits(output)[0]]
    for step in range(1, STEPS):
        output = feed(head.feed_back(output), base + step, base + step + 1, step)
        found.append(head.logits(output)[0])
    return found


def product_block(head: DFlashHead, batch: TargetBatch, base: int) -> list[Tensor]:
    """Logits of the slots after the token at base + 1."""
    features = batch.layers[0, : base + 1].bfloat16()
    assert head.features.width == features.shape[-1]
    head.bind(KVPools(16, 4, torch.float32, CPU))
    row = RowSlice(batch.token_ids[0, 1 : base + 2].tolist(), 0, list(range(1, 12)), 1)
    given = DraftInput(row, STEPS, SamplingParams(temperature=0.0), features=features)
    backend = choose_backend(None, head.attention_traits(), CPU)
    with torch.inference_mode():
        states = head.run([given], backend, 4)
        assert states is not None
        before = batch.token_ids[0, base + 1 :]
        return [head.step(states, before[i : i + 1], i)[1][0] for i in range(STEPS)]


def test_trained_head_when_loaded_computes_the_same_logits(
    trained: tuple[str, Path], folder: Path
) -> None:
    case, out = trained
    head, target = written_head(case, folder, out)
    batch = as_sent(
        target.read(torch.from_numpy(np.load(folder / "text.npy")[None, :20]).long(), head.layers)
    )
    with torch.no_grad():
        guesses = list(head.unroll(batch, STEPS))
    if case == "draft_model":
        model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(model(batch.token_ids).logits[:, 1:], guesses[0])
        assert (out / "tokenizer.json").exists()
        return
    base = 9
    for step, found in enumerate(product_chain(case, folder, out, batch, base)):
        expected = guesses[step][0, base + step]
        if head.draft_ids is not None:
            assert int(torch.isfinite(found).sum()) == len(head.draft_ids) == 128
            found = found[head.draft_ids]
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("case", ["dflash", "dspark"])
def test_blocks_of_a_training_step_guess_as_those_of_every_row(case: str, folder: Path) -> None:
    out = folder / f"some {case}"
    if not out.exists():
        assert main(flags(case, folder, "--steps", "20", "--out", str(out))) == 0
    head, target = written_head(case, folder, out)
    text = torch.from_numpy(np.load(folder / "text.npy")[:80].reshape(2, 40)).long()
    batch, lengths = target.read(text, head.layers), set()
    for head.draw in range(8):
        some = list(head.unroll(batch, STEPS))
        lengths.add(len(some))
        begins = head.begins.tolist()
        assert begins == sorted(set(begins))
        assert begins[-1] < 39
        assert len(begins) == min(39, 4 * 39 // (len(some) + (case == "dflash")))
        with torch.no_grad():
            every = list(head.unroll(batch, len(some)))
        for step, guesses in enumerate(some):
            inside = [row for row in begins if row + step < 39]
            expected = every[step][:, [row + step for row in inside]]
            torch.testing.assert_close(guesses[:, : len(inside)], expected, rtol=1e-4, atol=1e-4)
    assert lengths == {STEPS, STEPS // 2, STEPS // 4 or 1}


def test_trained_dspark_when_loaded_is_as_sure_of_its_first_token(folder: Path) -> None:
    out = folder / "sure"
    assert main(flags("dspark", folder, "--steps", "20", "--out", str(out))) == 0
    head, target = written_head("dspark", folder, out)
    text = torch.from_numpy(np.load(folder / "text.npy")[None, :20]).long()
    batch, base = as_sent(target.read(text, head.layers)), 9
    with torch.no_grad():
        next(head.unroll(batch, STEPS))
        expected = torch.nn.functional.logsigmoid(head.acceptance[0, base])
        product = load_dspark(out, folder / "target", torch.float32, CPU)
        product.bind(KVPools(16, 4, torch.float32, CPU))
        row = RowSlice(text[0, 1 : base + 2].tolist(), 0, list(range(1, 12)), 1)
        given = DraftInput(
            row,
            STEPS,
            SamplingParams(temperature=0.0),
            features=batch.layers[0, : base + 1].bfloat16(),
        )
        outputs = product.run([given], choose_backend(None, product.attention_traits(), CPU), 4)
        assert outputs is not None
        found = product.guess(outputs, text[0, base + 1 : base + 2], TargetDraws(None), STEPS, 1)
    assert abs(float(expected) - math.log(0.5)) > 1e-3  # it was trained
    torch.testing.assert_close(found[0, 3, 0].view(torch.float32), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", ["eagle3", "dflash", "dspark", "mtp"])
def test_states_of_training_are_those_that_a_scorer_sends(case: str, folder: Path) -> None:
    head, target = fresh_head(case, folder)
    size, prompt = target.config.hidden_size, tuple(range(5, 17))
    spec = FeatureSpec(size, head.layers, final_norm=not head.layers)
    options = ModelOptions(page_size=4, num_pages=64, features=spec)
    model = load_model(folder / "target", options, dtype=torch.float32)
    (sent,) = record(model, [(prompt, SamplingParams(temperature=0.0))], 8)
    batch = target.read(torch.tensor([[*prompt, *sent.token_ids[:8]]]), head.layers)
    expected = batch.layers if head.layers else batch.hidden
    found = sent.rows[: len(prompt) + 8].float()
    torch.testing.assert_close(found, expected[0], rtol=0.01, atol=0.01)


def test_training_of_every_method_lowers_the_loss(trained: tuple[str, Path], folder: Path) -> None:
    case, out = trained
    head, target = fresh_head(case, folder)
    untrained = mean_loss(head, target, folder)
    head, _ = written_head(case, folder, out)
    assert mean_loss(head, target, folder) < 0.95 * untrained


def mean_loss(head: Any, target: Target, folder: Path) -> float:
    windows = Windows([Source(np.load(folder / "text.npy"), 24, 5)], 480)
    trainer = Trainer(
        head, target, windows, TrainConfig(steps=1, unroll_steps=STEPS), Path(), Processes()
    )
    with torch.no_grad():
        return float(trainer._forward(windows.batch(0, 0, 1))[0])


def test_eagle3_when_fresh_begins_near_the_target(folder: Path) -> None:
    head, target = fresh_head("eagle3", folder)
    assert head.layers == (2, 3, 6)  # of 7; not 4, which leaves three of them out
    assert not {"embed_tokens.weight", "lm_head.weight"} & head.export().tensors.keys()
    assert "draft_vocab_size" not in head.export().config  # readers share the target's head
    batch = target.read(torch.arange(2, 62).view(3, 20), head.layers)
    with torch.no_grad():
        state = head.fc(batch.layers / head.state_scale)
        random = torch.nn.functional.linear(batch.layers, torch.randn_like(head.fc.weight))
    near = torch.nn.functional.cosine_similarity(state, batch.hidden, -1).mean()
    far = torch.nn.functional.cosine_similarity(random, batch.hidden, -1).abs().mean()
    assert near > 2 * far
    args = parsed("eagle3", folder)
    args.draft_vocab_size = 50
    some = build_head(args, target, [np.load(folder / "text.npy")])
    assert torch.equal(some.lm_head.weight, target.head[some.draft_ids])
    assert some.export().config["draft_vocab_size"] == 50


class CrashError(Exception):
    pass


def run_steps(
    folder: Path,
    out: Path,
    *,
    resume: bool = False,
    crash_at: int = 0,
    stop_at: int = 0,
    tokens_per_forward: int = 96,
) -> None:
    """Twelve steps of EAGLE-3 over two sources, saved every fourth."""
    head, target = fresh_head("eagle3", folder)
    rows = np.load(folder / "text.npy")[:2000].reshape(100, 20)
    sources = [Source(np.load(folder / "text.npy"), 24, 5), Source(rows, 24, 5)]
    config = TrainConfig(
        steps=12, unroll_steps=STEPS, save_steps=4, tokens_per_forward=tokens_per_forward
    )
    trainer = Trainer(head, target, Windows(sources, 96), config, out / "state.pt", Processes())
    if resume:
        trainer.resume()

    def on_step(progress: Progress) -> None:
        if progress.step == stop_at:
            trainer.stop()
        if progress.step == crash_at:
            raise CrashError

    if crash_at:
        with pytest.raises(CrashError):
            trainer.run(on_step)
    else:
        progress, finished = trainer.run(on_step)
        assert (progress.step, finished) == ((stop_at, False) if stop_at else (12, True))


def test_trainer_when_resumed_gives_the_weights_of_one_run(folder: Path, tmp_path: Path) -> None:
    run_steps(folder, tmp_path / "whole")
    run_steps(folder, tmp_path / "parts", crash_at=6)
    assert torch.load(tmp_path / "parts" / "state.pt")["progress"]["step"] == 4
    run_steps(folder, tmp_path / "parts", resume=True, stop_at=7)
    assert torch.load(tmp_path / "parts" / "state.pt")["progress"]["step"] == 7
    run_steps(folder, tmp_path / "parts", resume=True)
    whole, parts = (torch.load(tmp_path / name / "state.pt") for name in ("whole", "parts"))
    assert parts["progress"]["step"] == 12
    assert parts["progress"]["tokens"] == whole["progress"]["tokens"]
    for name, weight in whole["head"].items():
        assert torch.equal(weight, parts["head"][name]), name


def test_trainer_when_resumed_keeps_the_draft_vocabulary(folder: Path, tmp_path: Path) -> None:
    """It is counted in the data, which are not the same when the target writes them again."""
    more = ["--out", str(tmp_path), "--steps"]
    assert main(flags("eagle3 narrow", folder, *more, "1")) == 0
    before = load_file(tmp_path / "model.safetensors")["d2t"]
    np.save(folder / "others.npy", np.load(folder / "text.npy") + 200)
    others = ["--data", str(folder / "others.npy"), "--resume"]
    assert main(flags("eagle3 narrow", folder, *more, "2", *others)) == 0
    assert torch.equal(load_file(tmp_path / "model.safetensors")["d2t"], before)


def test_trainer_when_resumed_reads_earlier_responses(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--out", str(tmp_path), "--generate", "4", "--steps"]
    assert main(flags("medusa", folder, *more, "1")) == 0
    file = tmp_path / "responses.npy"
    rows = np.load(file)
    assert rows.shape == (4, 48)
    assert not list(tmp_path.glob("*.part"))
    np.save(file, rows[::-1])  # what is generated again would not be these
    assert main(flags("medusa", folder, *more, "2", "--resume")) == 0
    assert np.array_equal(np.load(file), rows[::-1])
    assert json.loads((tmp_path / "training.json").read_text())["step"] == 2
    file.write_bytes(b"cut off")
    assert main(flags("medusa", folder, *more, "3", "--resume")) == 2
    assert "responses.npy cannot be read" in capsys.readouterr().err
    file.unlink()
    assert main(flags("medusa", folder, *more, "3", "--resume")) == 0
    assert np.array_equal(np.load(file), rows)


def test_checkpoint_weights_have_the_permissions_of_the_config(trained: tuple[str, Path]) -> None:
    _, out = trained
    for file in out.glob("*.safetensors"):
        assert file.stat().st_mode == (out / "config.json").stat().st_mode


@pytest.mark.parametrize("content", [b"", b"something else"])
def test_trainer_with_a_broken_state_is_refused(
    content: bytes, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state.pt").write_bytes(content)
    more = ["--steps", "1", "--resume", "--out", str(tmp_path)]
    assert main(flags("medusa", folder, *more)) == 2
    assert "state.pt is no saved training" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["state.part", "config.json", "training.json"])
def test_trainer_with_a_full_disk_is_refused(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    assert main(flags("medusa", folder, "--steps", "1", "--out", str(tmp_path))) == 2
    assert "cannot be written: No space left on device." in capsys.readouterr().err
    assert not (tmp_path / "state.part").exists()


def test_trainer_step_in_parts_gives_the_same_weights(folder: Path, tmp_path: Path) -> None:
    run_steps(folder, tmp_path / "whole")
    run_steps(folder, tmp_path / "parts", tokens_per_forward=48)
    whole, parts = (torch.load(tmp_path / n / "state.pt")["head"] for n in ("whole", "parts"))
    fresh = fresh_head("eagle3", folder)[0].state_dict()
    for name, weight in whole.items():
        moved = (weight - fresh[name]).norm()
        assert (weight - parts[name]).norm() <= 0.05 * moved, name


@pytest.mark.slow
def test_trainer_with_two_processes_equals_one_with_both_parts(
    folder: Path, tmp_path: Path
) -> None:
    def command(name: str, tokens_per_step: int) -> list[str]:
        more = ["--steps", "3", "--tokens-per-step", str(tokens_per_step)]
        return flags("medusa", folder, *more, "--out", str(tmp_path / name))

    port = reserved_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "outrider.train", *command("two", 48)],
            env=process_environment(rank, port),
        )
        for rank in range(2)
    ]
    try:
        assert main(command("one", 96)) == 0
        assert [process.wait(timeout=100) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    two, one = (torch.load(tmp_path / name / "state.pt")["head"] for name in ("two", "one"))
    assert one["blocks.0.weight"].abs().max() > 0.01  # it was zero
    for name, weight in one.items():
        # Muon rounds to bfloat16 on the way.
        torch.testing.assert_close(two[name], weight, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("case", "more", "message"),
    [
        ("medusa", ["--data", "nowhere.bin", "--steps", "1"], "--data nowhere.bin"),
        ("medusa", [], "--steps or --seconds"),
        ("medusa", ["--steps", "1", "--resume", "--out", "nowhere"], "--resume"),
        ("mtp", ["--steps", "1", "--heads", "3"], "--kv-heads"),
        ("eagle3", ["--steps", "1", "--length", "4000"], "takes 128 at most"),
        ("eagle3", ["--steps", "1", "--data", SHORT], "give more text, or lower"),
        ("eagle3", ["--steps", "1", "--data", FOREIGN], "holds token 900"),
        ("eagle3", ["--steps", "1", "--data", NEGATIVE], "holds token -100"),
        # Before hours of training, not after them.
        ("eagle3", ["--steps", "100000000", "--heldout", SHORT], "give more text, or lower"),
        ("eagle3", ["--steps", "100000000", "--new-tokens", "5"], "--new-tokens"),
        ("eagle3", ["--steps", "100000000", "--heldout", NARROW], "give longer rows"),
        ("eagle3", ["--steps", "100000000", "--prompt-length", "7"], "raise --length and --prompt"),
        ("medusa", ["--steps", "100000000", "--out", SHORT], "cannot be written: Not a directory"),
    ],
)
def test_command_line_with_a_wrong_set_up_is_refused(
    case: str, more: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(folder / SHORT, np.arange(30))
    np.save(folder / FOREIGN, np.arange(901))
    np.save(folder / NEGATIVE, np.arange(-100, 300))
    np.save(folder / NARROW, np.arange(70).reshape(10, 7))
    files = (SHORT, FOREIGN, NEGATIVE, NARROW)
    more = [str(folder / name) if name in files else name for name in more]
    assert main(flags(case, folder, "--out", str(folder / "untrained"), *more)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag",
    [
        *("--seconds=0", "--seconds=-1", "--seconds=nan", "--seconds=inf", "--lr=nan"),
        *("--table-lr=-1", "--generate=-1", "--steps=0", "--steps=few", f"--seed={2**64}"),
    ],
)
def test_flag_with_an_impossible_number_is_refused(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["medusa", "--target", "embedded", "--data", "text", "--out", "head"]
    assert main([*needed, flag]) == 2
    name, _, value = flag.partition("=")
    said = capsys.readouterr().err
    assert said.startswith(f"outrider train: argument {name}: {value!r} is not")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "method", [*dict.fromkeys(case.split()[0] for case in METHODS), "responses"]
)
def test_flags_in_help_state_their_defaults(method: str) -> None:
    (methods,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for action in methods.choices[method]._actions:
        assert action.help, action.option_strings
        if isinstance(action.default, int | float) and not isinstance(action.default, bool):
            assert f"(default: {action.default}" in action.help, action.option_strings


def test_tokens_per_forward_on_cpu_take_a_few_gib() -> None:
    at_once = tokens_per_forward(8192, torch.device("cpu"))
    assert at_once * 8192 * BYTES_PER_LOGIT < 3 * 2**30


@pytest.mark.parametrize(("free_gib", "most"), [(130, 2**15), (16, 2**13)])
def test_tokens_per_forward_on_gpu_take_half_of_free_memory(
    free_gib: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = free_gib * 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2 * free))
    at_once = tokens_per_forward(8192, torch.device("cuda"))
    assert most // 2 < at_once <= most
    assert at_once * 8192 * BYTES_PER_LOGIT <= free / 2


def test_trainer_without_resume_keeps_an_earlier_state(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--out", str(tmp_path / "out"), "--steps")
    assert main(flags("medusa", folder, *more, "1")) == 0
    state = (tmp_path / "out/state.pt").read_bytes()
    assert main(flags("medusa", folder, *more, "2")) == 2
    assert "--resume" in capsys.readouterr().err
    assert (tmp_path / "out/state.pt").read_bytes() == state


@pytest.mark.parametrize("kind", sorted({*OTHERS} - {"Bloom"}))
@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model"])
def test_target_with_other_config_names_is_trained_for(
    method: str, kind: str, folder: Path, tmp_path: Path
) -> None:
    target = save_other_target(tmp_path / "target", kind)
    more = ["--target", str(target), "--out", str(tmp_path / "out"), "--steps", "2"]
    common = flags("medusa", folder, *more)[1:]
    assert main([method, *common]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_key_value_heads"] == config["num_attention_heads"] == 4
    assert config["head_dim"] == 8
    assert config["intermediate_size"] == (64 if kind == "GPTNeoX" else 128)
    assert config["rms_norm_eps"] == (1e-6 if kind == "OPT" else 1e-5)
    if method == "draft_model":
        return
    read: Any = load_eagle3 if method == "eagle3" else load_mtp
    assert read(tmp_path / "out", target, torch.float32, CPU).vocab_size == config["vocab_size"]
    shared, model = TargetTensors(target), AutoModelForCausalLM.from_pretrained(target)
    assert torch.equal(shared.embedding(), model.get_input_embeddings().weight)
    assert torch.equal(shared.head(), model.get_output_embeddings().weight)


def test_target_without_needed_settings_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(method: str, kind: str, **changes: int) -> int:
        target = save_other_target(tmp_path / kind, kind, **changes)
        more = ["--target", str(target), "--out", str(tmp_path / "out"), "--steps", "1"]
        return main([method, *flags("medusa", folder, *more)[1:]])

    assert train("medusa", "Bloom") == 2
    assert "has no max_position_embeddings" in capsys.readouterr().err
    assert train("medusa", "OPT", word_embed_proj_dim=16) == 2
    assert "embeddings have 16 values" in capsys.readouterr().err
    assert train("draft_model", "OPT", word_embed_proj_dim=16) == 0


def test_evaluation_with_short_rows_continues_them_whole(folder: Path, tmp_path: Path) -> None:
    """Nothing was compared: the text ended where the prompts were to."""
    np.save(tmp_path / "rows.npy", np.load(folder / "text.npy")[:1200].reshape(100, 12))
    more = ["--steps", "1", "--data", str(tmp_path / "rows.npy"), "--out", str(tmp_path)]
    more += ["--prompt-length", "60", "--new-tokens", str(2 * STEPS)]
    assert main(flags("medusa", folder, *more)) == 0
    facts = json.loads((tmp_path / "training.json").read_text())
    assert len(facts["matches"]) == STEPS
    assert facts["well_trained"] == (not facts["below_rule"])
    assert 1 <= facts["mean_length"] <= 1 + STEPS


def test_responses_alternate_greedy_and_sampled_rows(folder: Path, tmp_path: Path) -> None:
    common = ["--target", str(folder / "target"), "--data", str(folder / "text.npy")]
    lengths = ["--prompt-length", "16", "--new-tokens", "9"]
    answers = [
        "responses",
        *common,
        *lengths,
        "--count",
        "5",
        "--out",
        str(tmp_path / "new/own.npy"),
    ]
    assert main(answers) == 0
    rows = np.load(tmp_path / "new/own.npy")
    assert rows.shape == (5, 25)
    target = load_target(folder / "target", CPU, torch.float32)
    logits = target.read(torch.from_numpy(rows).long(), ()).logits
    greedy = logits[:, 15:-1].argmax(-1).numpy() == rows[:, 16:]
    assert greedy[::2].all()  # every other row
    assert not greedy[1::2].all()
    (tmp_path / "file").touch()
    answers[-1] = str(tmp_path / "file/own.npy")
    assert main(answers) == 2
    more = ["--steps", "2", "--generate", "4", "--out", str(tmp_path / "out")]
    assert main(flags("medusa", folder, *more)) == 0
    assert json.loads((tmp_path / "out" / "training.json").read_text())["step"] == 2
