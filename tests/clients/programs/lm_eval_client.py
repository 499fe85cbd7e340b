"""lm-evaluation-harness: scores through the server equal transformers' on the same weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}

import lm_eval
from cases import API, BASE_URL, case, main
from lm_eval.tasks import TaskManager

TARGET = os.environ["TARGET"]
TASKS = Path(__file__).parents[1] / "tasks"
os.chdir(TASKS)  # which the tasks' data is beside


def evaluate(model: str, arguments: dict[str, Any], task: str) -> tuple[dict[str, Any], list[Any]]:
    result: Any = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[task],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
        cache_requests=False,
    )
    scores = {k: v for k, v in result["results"][task].items() if isinstance(v, float)}
    samples = sorted(result["samples"][task], key=lambda sample: sample["doc_id"])
    return scores, [sample["resps"] for sample in samples]


def server(**more: Any) -> dict[str, Any]:
    place = {"model": "default", "base_url": f"{API}/completions", "num_concurrent": 4}
    return {**place, "tokenizer": TARGET, "max_length": 2048, "max_retries": 1, **more}


HERE = {"pretrained": TARGET, "dtype": "float32", "device": "cpu"}


@case
def loglikelihood() -> None:
    expected, theirs = evaluate("hf", HERE, "choices")
    got, ours = evaluate("local-completions", server(), "choices")
    assert got == expected, (got, expected)
    assert 0 < expected["acc,none"] < 1, "a score that tells nothing"
    for mine, other in zip(ours, theirs, strict=True):
        for ((a, a_greedy),), ((b, b_greedy),) in zip(mine, other, strict=True):
            assert abs(float(a) - float(b)) < 1e-3
            assert str(a_greedy) == str(b_greedy)


@case
def generation() -> None:
    expected, theirs = evaluate("hf", HERE, "lines")
    got, ours = evaluate("local-completions", server(), "lines")
    assert got == expected, (got, expected)
    assert ours == theirs


@case
def tokenizer_of_the_server() -> None:
    expected, theirs = evaluate("local-completions", server(), "lines")
    remote = server(tokenizer_backend="remote", tokenizer=None)
    got, ours = evaluate("local-completions", remote, "lines")
    assert (got, ours) == (expected, theirs), BASE_URL


main()
