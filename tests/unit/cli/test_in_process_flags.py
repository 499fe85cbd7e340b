"""What `--in-process-proposer` makes of a scorer's flags."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from outrider import engines
from outrider.drafting.building.config import DraftModelConfig, HeadConfig, NgramConfig
from outrider.errors import ConfigError
from outrider.vllm.draft_server import ServerOptions
from scorer_service.__main__ import resolve
from scorer_service.config import ScorerOptions


def test_scorer_without_in_process_flags_drafts_nothing() -> None:
    flags = resolve([])
    assert (flags["in_process_proposer"], flags["hidden_features"]) == ((), None)


@pytest.mark.parametrize("method", ["suffix", "draft_model --model embedded"])
def test_scorer_without_draft_tokens_builds_no_proposer(method: str) -> None:
    flags = resolve(["--num-speculative-tokens=0", f"--in-process-proposer=--method {method}"])
    assert flags["in_process_proposer"] == ()


def test_draft_model_in_process_drafts_on_demand_on_target_device() -> None:
    flags = resolve(
        ["--device=cuda:1", "--in-process-proposer=--method draft_model --model 'a folder'"]
    )
    [method] = flags["in_process_proposer"]
    assert isinstance(method, DraftModelConfig)
    assert (method.device, method.model, method.max_branches) == ("cuda", "a folder", 0)
    assert flags["hidden_features"] is None


def test_module_in_process_reads_the_scorers_model(tmp_path: Path) -> None:
    names = {"eagle_aux_hidden_state_layer_ids": [2, 14, 25]}
    (tmp_path / "config.json").write_text(json.dumps(names))
    module = f"--in-process-proposer=--method ngram,eagle3 --model {tmp_path} --tree-width 1"
    flags = resolve(["--model=target", "--engine=native", module])
    copies, reads = flags["in_process_proposer"]
    assert isinstance(copies, NgramConfig)
    assert isinstance(reads, HeadConfig)
    assert (reads.target_model, reads.tree_width) == ("target", 1)
    assert flags["hidden_features"] == "2,14,25"
    assert resolve(["--hidden-features=1,2", module])["hidden_features"] == "1,2"


@pytest.mark.parametrize(
    ("method", "states"),
    [("eagle3", "2,4,7"), ("dspark", "2,4,5,7"), ("mtp", "final"), ("medusa", "final")],
)
def test_embedded_module_in_process_says_what_it_reads(method: str, states: str) -> None:
    flags = resolve([f"--in-process-proposer=--method {method}"])
    assert flags["hidden_features"] == states


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--method lucky", "invalid choice: 'lucky'"),
        ("--method ngram --scorer here:1", "unrecognized arguments: --scorer here:1"),
        ("--method 'ngram", "No closing quotation"),
        ("--method ngram --model x", "--model is of no use"),
        ("--method draft_model,eagle3", "only one model"),
        ("--method eagle", "needs --model"),
        ("--max-draft-tokens 0", "--max-draft-tokens is 1 to"),
        ("--method ngram --prompt-lookup-max 0", "--prompt-lookup-min must be .* --prompt-lookup-"),
        (
            "--method suffix --suffix-decoding-max-tree-depth 0",
            "--suffix-decoding-max-tree-depth must be",
        ),
        ("--method eagle3 --target-model another", "--target-model another is not"),
    ],
)
def test_in_process_flags_that_are_bad_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--in-process-proposer: .*{message}"):
        resolve([f"--in-process-proposer={flags}"])


def test_embedded_module_with_other_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs --model"):
        resolve(["--model=another", "--engine=native", "--in-process-proposer=--method eagle3"])


@pytest.fixture
def vllm_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda _: object())


@pytest.mark.usefixtures("vllm_installed")
@pytest.mark.parametrize("flags", ["--method=ngram", "--method 'ngram' --target-model NAME", ""])
def test_vllms_worker_reads_the_flags_that_the_scorer_took(flags: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    name = f"{tmp_path}/"  # vLLM has the folder, which may be spelled otherwise
    flags = flags.replace("NAME", name)
    args = resolve(["--engine=vllm", f"--model={name}", f"--in-process-proposer={flags}"])
    del args["exit_with_parent"]
    words = ScorerOptions(**args).for_vllm().draft_flags
    ours = ServerOptions.parse(shlex.join(words), 0).methods(str(tmp_path), "cpu")
    assert ours == args["in_process_proposer"]


@pytest.mark.usefixtures("vllm_installed")
def test_vllms_own_speculation_beside_a_proposer_in_process_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--in-process-proposer and .* leave one of them out"):
        resolve(
            [
                *("--engine=vllm", "--in-process-proposer=--method ngram"),
                *("--", '--speculative-config={"method": "ngram"}'),
            ]
        )
