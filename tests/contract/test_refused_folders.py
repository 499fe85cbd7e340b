"""A service of a folder that cannot be served ends with code 2 and one line that says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import proposer_service.__main__ as proposer
import scorer_service.__main__ as scorer
from outrider.models.local_files import check_target
from tests.support.checkpoints.broken import BY_CONFIG, BY_FILES, write_whole
from tests.support.checkpoints.modules import FORMATS
from tests.support.models.tokenizers import byte_level_bpe

ONLY_SERVED = ("tokenizer", "eos_token_id")  # a draft model's are not used
PROPOSER = ("--scorer", "127.0.0.1:1", "--method")


def _broken(folder: Path, kind: str) -> Path:
    (BY_FILES | BY_CONFIG)[kind](write_whole(folder))
    return folder


@pytest.mark.parametrize("kind", BY_FILES)
def test_service_of_a_broken_folder_ends_before_it_listens(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(_broken(tmp_path / "model", kind))
    assert scorer.main(["--model", folder]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("scorer: ")
    assert folder in said.err
    if any(word in kind for word in ONLY_SERVED):
        return
    assert proposer.main([*PROPOSER, "draft_model", "--model", folder]) == 2
    assert capsys.readouterr().err == said.err.replace("scorer: ", "proposer: ")


def test_service_of_a_broken_module_ends_before_it_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, target = FORMATS["Qwen3.5's MTP layer"].write(tmp_path)
    (module / "model-00001-of-00002.safetensors").write_bytes(b"")
    flags = ["mtp", "--model", str(module), "--target-model", str(target)]
    assert proposer.main([*PROPOSER, *flags]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "model-00001-of-00002.safetensors is no safetensors file" in said
    target = write_whole(tmp_path / "target")
    quoted = f"--method mtp --model {module}"
    assert scorer.main(["--model", str(target), "--in-process-proposer", quoted]) == 2
    assert capsys.readouterr().err == said.replace("proposer: ", "scorer: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions hide nothing from root")
def test_service_of_a_folder_that_cannot_be_read_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_whole(tmp_path / "model")
    folder.chmod(0)
    assert scorer.main(["--model", str(folder)]) == 2
    assert "Permission denied" in capsys.readouterr().err
    folder.chmod(0o700)


def test_target_whose_surplus_tokens_are_special_is_accepted(tmp_path: Path) -> None:
    """As of small members of a family, whose larger ones read images."""
    folder = write_whole(tmp_path)
    tokenizer = byte_level_bpe(318)
    tokenizer.add_special_tokens(["<image>", "<video>", "<audio>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() > 320
    check_target(str(folder))


@pytest.mark.parametrize(("kind", "lines"), [("GPTQ", 1), ("an encoder", 2)])
def test_scorer_process_of_a_refused_folder_ends_with_code_2(
    tmp_path: Path, kind: str, lines: int
) -> None:
    """Where config.json has to be understood, a line says before that torch is loaded."""
    folder = _broken(tmp_path / "model", kind)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "scorer_service", "--model", str(folder)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", lines)
    assert done.stderr.splitlines()[-1].startswith("scorer: ")
