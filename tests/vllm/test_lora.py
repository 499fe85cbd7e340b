"""A request may name an adapter, which vLLM adds to the model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import save_file

from outrider.models.resolve import resolve_model
from outrider.models.tokenizer import Tokenizer
from outrider.v1 import common_pb2
from tests.support.services.up import addresses, service
from tests.vllm.test_scorer import generate, tokens_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(500)]

TARGET = resolve_model("embedded", "target")
PROMPT = "def fibonacci(n):\n"
RANK, ALPHA = 4, 8


def _write_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """Write an adapter of the queries' layers; returns what it adds, by the weight's name."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    adapter, added = {}, {}
    for name, weight in AutoModelForCausalLM.from_pretrained(TARGET).state_dict().items():
        if name.endswith("q_proj.weight"):
            key = f"base_model.model.{name.removesuffix('.weight')}"
            down = torch.randn(RANK, weight.shape[1]) * 0.3
            up = torch.randn(weight.shape[0], RANK) * 0.3
            adapter |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
            added[name] = up @ down * (ALPHA / RANK)
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    fields = {
        **{"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"]},
        **{"task_type": "CAUSAL_LM", "bias": "none", "base_model_name_or_path": str(TARGET)},
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return added


def _merged(added: dict[str, torch.Tensor], prompt: list[int], length: int) -> list[int]:
    """Return the greedy continuation by transformers, with the adapter merged in."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight += added.get(name, 0)
        ids = list(prompt)
        for _ in range(length):  # past the model's ends, as the requests ask
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


async def test_request_that_names_an_adapter_is_answered_by_it(tmp_path: Path) -> None:
    added = _write_adapter(tmp_path / "adapter")
    prompt = Tokenizer.load(TARGET).encode(PROMPT)
    flags = (
        *("scorer_service", "--engine", "vllm", "--model", "embedded", "--max-num-seqs", 4),
        *("--max-model-len", 256, "--kv-cache-memory", 64, "--num-speculative-tokens", 0),
        *("--", "--enforce-eager", "--enable-lora", "--max-lora-rank", 8),
        *("--lora-modules", f"mine={tmp_path / 'adapter'}"),
    )
    texts: dict[str, list[list[int]]] = {}
    with service(*flags) as process:
        try:
            address = addresses(process)["grpc"]
            for adapter in ("", "mine", ""):
                stop = common_pb2.StopParams(max_tokens=12, ignore_eos=True)
                told = await generate(address, prompt, stop=stop, adapter=adapter)
                texts.setdefault(adapter, []).append(tokens_of(told))
            with pytest.raises(grpc.aio.AioRpcError, match="no adapter 'other'"):
                await generate(address, prompt, adapter="other")
        finally:
            process.terminate()
            process.wait(60)
    assert texts["mine"] == [_merged(added, prompt, 12)]
    assert texts[""] == [_merged({}, prompt, 12)] * 2
    assert texts["mine"][0] != texts[""][0]


def test_adapter_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    """A request for it would end vLLM's engine."""
    command = [sys.executable, "-m", "scorer_service", "--engine", "vllm", "--port", "0"]
    command += ["--max-num-seqs", "4", "--max-model-len", "256", "--kv-cache-memory", "64"]
    command += ["--data-port", "0", "--", "--enforce-eager", "--enable-lora"]
    command += ["--lora-modules", f"mine={tmp_path / 'nothing'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350)
    assert done.returncode == 2
    assert re.match("scorer: --lora-modules mine: .*nothing", done.stderr.splitlines()[-1])
