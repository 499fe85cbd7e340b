"""Two ranks on two GPUs generate the texts of one, in float32."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

from tests.support import architectures
from tests.support.architectures import ARCHITECTURES, random_model
from tests.support.shards import load, say

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_ranks_on_two_gpus_generate_the_texts_of_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Older versions of transformers split no vocabulary that the ranks do not divide evenly.
    monkeypatch.setitem(architectures._COMMON, "vocab_size", 96)
    random_model(ARCHITECTURES[name], torch.float32).save_pretrained(tmp_path / name)  # type: ignore[operator]
    out = tmp_path / "said.json"
    module = ("-m", "tests.support.shards", out, "float32", tmp_path / name)
    subprocess.run([*TORCHRUN, "--nproc-per-node=2", *module], check=True, timeout=300)
    (said,) = json.loads(out.read_text()).values()
    whole = load(tmp_path / name, torch.float32, device=torch.device("cuda", 0))
    assert said == json.loads(json.dumps(say(whole)))
    assert said["drafted"] == said["plain"]
