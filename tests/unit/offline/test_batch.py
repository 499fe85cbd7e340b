from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.openai.requests import ChatRequest, CompletionRequest
from outrider.errors import ConfigError, OutriderError
from outrider.offline import engine
from outrider.offline.batch import main, read_line, run_batch
from outrider.offline.engine import LocalEngine
from outrider.offline.places import Places


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


COMPLETION = line("a", model="tiny", prompt=["x", "y"], n=2, temperature=0.5, seed=4, max_tokens=4)
CHAT = line(
    "b",
    "/v1/chat/completions",
    messages=[{"role": "user", "content": "hi"}],
    logprobs=True,
    aux_info=True,
    max_tokens=4,
)


def test_read_line_when_right_gives_its_request() -> None:
    seen: set[str] = set()
    assert isinstance(read_line(COMPLETION, seen)[1], CompletionRequest)
    assert isinstance(read_line(CHAT, seen)[1], ChatRequest)
    assert seen == {"a", "b"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "custom_id"),
        (line("seen", prompt="x"), "earlier line"),
        (json.dumps({"custom_id": "c", "method": "GET"}), 'method must be "POST"'),
        (line("c", "/v1/embeddings", input="x"), "url must be one of /v1/completions"),
        (line("c", prompt="x", stream=True), "stream must be false"),
        (line("c", prompt=3), "prompt must be a string"),
        (json.dumps({"custom_id": "c", "method": "POST", "url": "/v1/completions"}), "valid JSON"),
        (json.dumps({"custom_id": "c", "method": "POST", "url": []}), "url must be one of"),
        ("[" * 100_000, "nested too deeply"),
        (b'{"custom_id": "\xff"}', "not JSON: 'utf-8' codec can't decode"),
    ],
)
def test_read_line_when_wrong_says_why(text: str | bytes, message: str) -> None:
    _, error = read_line(text, {"seen"})
    assert isinstance(error, OutriderError)
    assert message in error.message


def test_batch_with_good_and_bad_lines_answers_as_http_does(shared_engine: LocalEngine) -> None:
    written: list[str] = []
    lines = [
        COMPLETION,
        "",
        CHAT,
        line("other", model="gpt", prompt="x"),
        line("long", prompt=[2] * 600),
        "broken",
    ]
    counts = run_batch(shared_engine, lines, written.append)
    assert (counts.answered, counts.refused) == (2, 3)
    answers = {answer["custom_id"]: answer["response"] for answer in map(json.loads, written)}
    completion, chat = answers["a"]["body"], answers["b"]["body"]
    assert answers["a"]["status_code"] == 200
    assert completion["object"] == "text_completion"
    assert len(completion["choices"]) == 4
    assert completion["usage"]["completion_tokens"] <= 16
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert chat["choices"][0]["logprobs"]["content"]
    assert chat["aux_info"]["output_len"] == chat["usage"]["completion_tokens"]
    assert answers["other"]["status_code"] == 404
    assert answers["other"]["body"]["error"]["code"] == "model_not_found"
    assert answers["long"]["body"]["error"]["code"] == "context_length_exceeded"
    assert answers[None]["status_code"] == 400
    assert answers[None]["body"]["error"]["message"].startswith("Line 6: The line is not JSON")


def test_completion_that_echoes_with_logprobs_scores_the_prompt(
    shared_engine: LocalEngine,
) -> None:
    asked = {"prompt": ["one two", "three"], "echo": True, "logprobs": 1, "prompt_logprobs": 0}
    written: list[str] = []
    lines = [line("scored", **asked, max_tokens=0), line("more", **asked, max_tokens=2)]
    assert run_batch(shared_engine, [*lines, line("x", prompt="x", max_tokens=0)], written.append)
    answers = {answer["custom_id"]: answer["response"] for answer in map(json.loads, written)}
    scored, more = (answers[name]["body"] for name in ("scored", "more"))
    assert scored["usage"]["completion_tokens"] == 0
    assert more["usage"]["completion_tokens"] > 0
    for choice, longer, prompt in zip(
        scored["choices"], more["choices"], asked["prompt"], strict=True
    ):
        assert choice["text"] == prompt
        assert longer["text"].startswith(prompt)
        logprobs = choice["logprobs"]
        count = len(logprobs["tokens"])
        assert logprobs["token_logprobs"][0] is None
        assert all(logprob < 0 for logprob in logprobs["token_logprobs"][1:])
        assert longer["logprobs"]["token_logprobs"][1:count] == pytest.approx(
            logprobs["token_logprobs"][1:]
        )
        assert longer["logprobs"]["text_offset"][:count] == logprobs["text_offset"]
        assert len(choice["prompt_logprobs"]) == count
        assert choice["prompt_logprobs"][0] is None
    assert answers["x"]["status_code"] == 400
    assert answers["x"]["body"]["error"]["param"] == "max_tokens"


def test_batch_when_an_answer_cannot_be_written_ends_with_an_error(
    shared_engine: LocalEngine,
) -> None:
    tried: list[str] = []

    def full(text: str) -> None:
        tried.append(text)
        raise OSError(28, "No space left on device")

    lines = [line(f"{number}", prompt="x", max_tokens=1) for number in range(20)]
    with pytest.raises(OutriderError, match="No space left on device"):
        run_batch(shared_engine, lines, full)
    assert len(tried) == 1


def test_batch_command_with_a_file_writes_one_answer_per_line(
    shared_engine: LocalEngine,
    pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(engine, "LocalEngine", lambda *_: shared_engine)
    monkeypatch.setattr(shared_engine, "close", lambda: None)
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(f"{COMPLETION}\n{CHAT}\n")
    flags = ["-i", str(requests), "-o", str(answers), "--model", str(pair[0])]
    assert main(flags) == 0
    assert {json.loads(text)["custom_id"] for text in answers.read_text().splitlines()} == {
        "a",
        "b",
    }
    assert "2 answered, 0 refused" in capsys.readouterr().err
    assert main([*flags[2:], "-i", str(tmp_path / "missing")]) == 2
    assert main([*flags, "--speculative-config", "{"]) == 2
    assert "--speculative-config is not JSON" in capsys.readouterr().err
    answered = answers.read_text()
    lookup = ["--speculative-config", '{"method": "ngram", "prompt_lookup_max": 0}']
    for wrong, told in (
        (["--speculative-config", '"ngram"'], "--speculative-config: give an object"),
        (lookup, "batch: --speculative-config: prompt_lookup_min must be at least 1"),
        (["--max-num-seqs", "0"], "argument --max-num-seqs: '0' is not"),
        (["--gpu-memory-utilization", "0"], "--gpu-memory-utilization:"),
        (["--seed", "-1"], "--seed must be"),
        (["-o", str(requests)], "-o is the file of -i"),
    ):
        assert main([*flags, *wrong]) == 2
        assert told in capsys.readouterr().err
    assert requests.read_text() == f"{COMPLETION}\n{CHAT}\n"
    assert main([*flags, "-o", "/dev/full"]) != 0
    assert "No space left on device" in capsys.readouterr().err
    assert main(flags) == 0
    assert len(answers.read_text().splitlines()) == len(answered.splitlines())

    def fails(*_: Any) -> LocalEngine:
        assert answers.read_text()
        raise ConfigError("no room")

    monkeypatch.setattr(engine, "LocalEngine", fails)
    assert main(flags) == 2
    assert answers.read_text()


def test_batch_line_with_many_prompts_waits_for_room_for_all_of_them(
    shared_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    take = Places.take

    async def noted(places: Places, number: int) -> None:
        asked.append(number)
        await take(places, number)

    monkeypatch.setattr(Places, "take", noted)
    written: list[str] = []
    fits = line("fits", prompt=["x", "y", "z"], n=2, max_tokens=1)
    too_many = line("too many", prompt=["x"] * 9, n=128)
    run_batch(shared_engine, [fits, too_many], written.append)
    answers = {answer["custom_id"]: answer["response"] for answer in map(json.loads, written)}
    assert asked == [6]
    assert answers["fits"]["status_code"] == 200
    assert answers["too many"]["status_code"] == 400
    assert "1152 completions; at most 1024" in answers["too many"]["body"]["error"]["message"]
