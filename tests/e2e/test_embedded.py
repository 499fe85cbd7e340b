"""The models that ship with Outrider: what a newcomer sees, and the text transformers writes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.models.resolve import resolve_model
from tests.support.services.options import GenerateOptions
from tests.support.services.up import (
    EVERY_ROUND,
    OUTRIDER,
    Up,
    complete,
    complete_all,
    run_outrider,
    running,
)

pytestmark = pytest.mark.timeout(600)

NUM_TOKENS = 48


def heldout_prompts(count: int) -> list[str]:
    file = resources.files("outrider.models") / "data" / "heldout_prompts.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:: len(lines) // count][:count]]


@pytest.fixture(scope="module")
def stack() -> Iterator[Up]:
    with running(*EVERY_ROUND) as up:
        yield up


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    """The embedded target's tokenizer and model, by transformers."""
    folder = resolve_model(None, "target")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


async def test_embedded_pair_when_greedy_equals_transformers(
    stack: Up, reference: tuple[Any, Any]
) -> None:
    """Acceptance far below what the model card says: a broken draft, not a slow machine."""
    tokenizer, model = reference
    rounds = accepted = 0
    options = GenerateOptions(
        prompt="", max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, aux_info=True
    )
    prompts = heldout_prompts(4)
    answers = await complete_all(stack.grpc, *(replace(options, prompt=one) for one in prompts))
    for prompt, done in zip(prompts, answers, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(
            **inputs,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            do_sample=False,
        )
        assert list(done.token_ids) == output[0, inputs["input_ids"].shape[1] :].tolist()
        assert done.aux.accepted > 0
        accepted += done.aux.accepted
        rounds += sum(done.aux.k_histogram[1:])
    assert 1 + accepted / rounds > 2.0


def test_embedded_pair_with_penalties_and_logprobs_equals_transformers(
    stack: Up, reference: tuple[Any, Any]
) -> None:
    tokenizer, model = reference
    (prompt,) = heldout_prompts(1)
    body = {
        **{"model": "default", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0},
        **{"repetition_penalty": 1.4, "min_tokens": NUM_TOKENS, "logprobs": 0},
        "aux_info": True,
    }
    answer = httpx.post(f"{stack.http}/v1/completions", json=body, timeout=120)
    (choice,) = answer.raise_for_status().json()["choices"]
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(
        **inputs,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        repetition_penalty=1.4,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :]
    assert choice["text"] == tokenizer.decode(tokens)
    raw = torch.cat(output.logits).log_softmax(dim=-1)
    truth = raw.gather(1, tokens[:, None])[:, 0].tolist()
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(truth, abs=1e-3)
    assert answer.json()["aux_info"]["drafted"] > 0


async def test_seed_when_repeated_gives_same_text(stack: Up) -> None:
    (prompt,) = heldout_prompts(1)
    options = GenerateOptions(
        prompt=prompt, max_tokens=NUM_TOKENS, temperature=1.0, top_p=0.95, seed=7, aux_info=True
    )
    plain = await complete(stack.grpc, replace(options, speculation=False), timeout_s=120)
    drafted = (replace(options, num_speculative_tokens=k) for k in (1, 4, 8))
    for done in await complete_all(stack.grpc, *drafted):
        assert done.token_ids == plain.token_ids


def test_json_schema_with_drafts_is_satisfied(stack: Up) -> None:
    """The scorer masks, and the draft model alike: most drafts hold, and none changes the text."""
    schema = {
        "type": "object",
        "properties": {
            "tool_name": {"enum": ["search_documents", "create_ticket", "send_message"]},
            "max_results": {"type": "integer", "minimum": 1, "maximum": 50},
            "include_archived": {"type": "boolean"},
        },
        "required": ["tool_name", "max_results", "include_archived"],
        "additionalProperties": False,
    }
    body = {
        "model": "default",
        "prompt": "# the call of the tool, as JSON\n",
        "max_tokens": 120,
        "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}},
        "aux_info": True,
    }
    rounds = accepted = 0
    for temperature in (0.0, 1.0):
        texts = set()
        for enabled in (True, False):
            settings = {"temperature": temperature, "seed": 3, "speculation": {"enabled": enabled}}
            answer = httpx.post(
                f"{stack.http}/v1/completions", json={**body, **settings}, timeout=120
            )
            (choice,) = answer.raise_for_status().json()["choices"]
            assert choice["finish_reason"] == "stop"
            texts.add(choice["text"])
            aux = answer.json()["aux_info"]
            accepted += aux["accepted"]
            rounds += sum(aux["k_histogram"][1:])
        (text,) = texts
        value = json.loads(text)
        assert set(value) == set(schema["required"])
        assert 1 <= value["max_results"] <= 50
    assert accepted > rounds > 0, "far below what masks give: about 2 a round"


def test_readme_commands_when_typed_work(stack: Up) -> None:
    """Every block that asks the server, as it stands but for the addresses."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    port = stack.http.rpartition(":")[2]
    here = readme.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```", here, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == ["sh", "python", "python", "python", "sh"]
    for kind, text in blocks:
        text = text.replace("127.0.0.1:50051", stack.grpc)
        text = text.replace("outrider generate", f"{shlex.join(OUTRIDER)} generate", 1)
        if "generate" in text and kind == "sh":
            text = text.rstrip() + f" --address {stack.grpc}\n"
        argv = [sys.executable, "-c", text] if kind == "python" else ["sh", "-ec", text]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        answer = done.stdout
        if "curl" in text:
            body = json.loads(answer)
            assert body["aux_info"]["output_len"] == body["usage"]["completion_tokens"] > 0
            answer = body["choices"][0]["text"]
        assert answer.strip(), f"no answer to:\n{text}"


def test_demo_of_embedded_pair_shows_both_runs() -> None:
    done = run_outrider("demo", "--max-tokens", 32, timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert "The text is identical" in done.stdout
    for word in ("accepted", "recovered", "bonus", "tokens per second", "avg_tokens_per_iter"):
        assert word in done.stdout
