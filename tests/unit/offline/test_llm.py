from __future__ import annotations

import asyncio
import gc
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import outrider
from gateway.generation import Chunk, Writer
from outrider import LLM, RequestOutput, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.engine_thread import EngineThread
from outrider.errors import (
    ConfigError,
    InternalError,
    InvalidRequestError,
    PromptTooLongError,
    UnavailableError,
)
from outrider.offline.engine import LocalEngine
from outrider.offline.switching import Switching
from outrider.types import StepEvents
from scorer_service.config import ScorerOptions
from tests.support.waiting import wait_until

PROMPTS = ["def fib(n):", "The future of AI is", "x"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def reference(pair: tuple[Path, Path]) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(pair[0], dtype=torch.float32)


@pytest.fixture
def llm(engine: list[ScorerOptions], pair: tuple[Path, Path]) -> LLM:
    loaded = LLM(str(pair[0]))
    assert len(engine) == 1
    return loaded


def text_of(outputs: list[RequestOutput]) -> list[str]:
    return [each.text for output in outputs for each in output.outputs]


@torch.inference_mode()
def continued(model: LlamaForCausalLM, ids: list[int], max_tokens: int) -> list[int]:
    output = model.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False)
    new = output[0, len(ids) :].tolist()
    return new[: new.index(1)] if 1 in new else new  # without the end


def test_generate_when_greedy_equals_transformers(
    llm: LLM, reference: LlamaForCausalLM, pair: tuple[Path, Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = tokenizer(prompt).input_ids
        expected = continued(reference, ids, 24)
        assert output.prompt == prompt
        assert output.prompt_token_ids == ids
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].text == tokenizer.decode(expected, skip_special_tokens=True)
        assert output.finished
        assert output.aux_info is not None
        assert output.aux_info.output_len == len(expected)
    assert sum(output.aux_info.accepted for output in outputs if output.aux_info) > 0


def test_generate_with_prompt_logprobs_equals_transformers_also_for_a_repeated_prompt(
    llm: LLM, reference: LlamaForCausalLM
) -> None:
    prompt = "def fib(n):\n" * 12
    for max_tokens in (4, 0):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=2)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        ids = output.prompt_token_ids
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        told = output.prompt_logprobs
        assert told is not None
        assert told[0] is None
        assert len(told) == len(ids)
        for place, entry in enumerate(told[1:]):
            assert entry is not None
            own = entry[ids[place + 1]].logprob
            assert own == pytest.approx(float(expected[place, ids[place + 1]]), abs=2e-4)
            best = expected[place].topk(2).values.tolist()
            ranked = sorted((each.logprob for each in entry.values() if each.rank), reverse=True)
            assert ranked == pytest.approx(best, abs=2e-4)
        assert (len(output.outputs[0].token_ids) == 0) is (max_tokens == 0)


def test_generate_with_and_without_drafts_gives_the_same_text(llm: LLM) -> None:
    def params(*, enabled: bool) -> SamplingParams:
        return SamplingParams(
            temperature=0.9, seed=5, max_tokens=24, extra_args={"speculation": {"enabled": enabled}}
        )

    drafted = llm.generate(PROMPTS, params(enabled=True), use_tqdm=False)
    plain = llm.generate(PROMPTS, params(enabled=False), use_tqdm=False)
    assert text_of(drafted) == text_of(plain)
    assert sum(output.aux_info.drafted for output in drafted if output.aux_info) > 0
    assert sum(output.aux_info.drafted for output in plain if output.aux_info) == 0


@pytest.mark.usefixtures("engine")
def test_llm_with_same_seed_repeats_itself_but_not_within_a_call(pair: tuple[Path, Path]) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8)
    first, second = (LLM(str(pair[0]), seed=3) for _ in range(2))
    texts = text_of(first.generate(["x", "x"], params, use_tqdm=False))
    assert texts == text_of(second.generate(["x", "x"], params, use_tqdm=False))
    assert texts[0] != texts[1]


def test_generate_from_token_ids_equals_text(llm: LLM) -> None:
    whole = llm.generate("def fib(n):", GREEDY, use_tqdm=False)[0]
    ids = whole.prompt_token_ids
    by_ids = llm.generate([{"prompt_token_ids": ids}, ids], GREEDY, use_tqdm=False)
    by_text = llm.generate({"prompt": "def fib(n):"}, GREEDY, use_tqdm=False)
    assert text_of(by_ids) == [whole.outputs[0].text] * 2
    assert by_ids[0].prompt is None
    assert text_of(by_text) == text_of([whole])
    assert text_of(llm.generate(ids, GREEDY, use_tqdm=False)) == text_of([whole])


@pytest.mark.parametrize(
    "prompts",
    [
        *(None, 5, [None], ["x", 5], [["x"]], {"prompt": None}, {"text": "x"}, iter("x")),
        {"prompt_token_ids": [1.5, 2]},
    ],
)
def test_generate_from_what_is_no_prompt_says_what_a_prompt_is(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="A prompt is a text, token ids") as refused:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert refused.value.param == "prompt"


def test_generate_with_params_for_each_prompt_uses_them(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 5, 3)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5, 3]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3
    with pytest.raises(InvalidRequestError, match="3 prompts and 2 sampling parameters"):
        llm.generate(PROMPTS, params[:2])


def test_generate_at_the_context_length_ends(llm: LLM) -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    [output] = llm.generate([[2] * 500], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].finish_reason == "length"


def test_generate_more_prompts_than_rows_answers_each(llm: LLM) -> None:
    outputs = llm.generate([[n + 2] for n in range(40)], SamplingParams(max_tokens=2))
    assert [output.prompt_token_ids for output in outputs] == [[n + 2] for n in range(40)]


def test_generate_begins_with_as_many_prompts_as_fit_a_step(
    llm: LLM, shared_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = shared_engine._core._engine
    assert isinstance(thread, EngineThread)
    sizes: list[int] = []
    publish = thread._publish

    def note(engine: Engine, events: StepEvents | None) -> None:
        if events is not None and events.timings is not None:
            sizes.append(events.timings.num_rows)
        publish(engine, events)

    monkeypatch.setattr(thread, "_publish", note)
    llm.generate([[2, 3 + i] for i in range(8)], GREEDY, use_tqdm=False)
    assert sizes[0] == 8


def test_answer_whose_first_prompt_fails_submits_no_other(
    llm: LLM, shared_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = shared_engine._core._hub
    assert hub is not None
    asked: list[object] = []

    def refuse(request: object, *_: object) -> None:
        asked.append(request)
        raise InvalidRequestError("No.", param="json")

    monkeypatch.setattr(hub, "submit", refuse)
    request = SamplingParams(max_tokens=4).completion_request()
    body = request.model_copy(update={"prompt": [[2], [3]]})
    with pytest.raises(InvalidRequestError, match="No"):
        shared_engine.answer(body).result(30)
    assert len(asked) == 1
    with pytest.raises(InvalidRequestError, match="No"):
        llm.generate([[2], [3]], use_tqdm=False)


@pytest.mark.parametrize("stops", [False, True])
def test_error_at_the_end_of_a_text_is_raised(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    [output] = llm.generate("x", GREEDY, use_tqdm=False)
    params = SamplingParams(
        temperature=0.0, max_tokens=8, stop=[output.outputs[0].text[:3]] if stops else None
    )

    def fail(_: Writer) -> Chunk:
        raise InternalError("It broke.")

    monkeypatch.setattr(Writer, "end", fail)
    with pytest.raises(InternalError, match="It broke"):
        llm.generate(["x", "y"], params, use_tqdm=False)
    monkeypatch.undo()
    assert text_of(llm.generate("x", GREEDY, use_tqdm=False)) == text_of([output])


def test_generate_several_choices_differ_and_the_best_is_likeliest(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=6, logprobs=0, ignore_eos=True)
    [output] = llm.generate("x", params, use_tqdm=False)
    assert len({each.text for each in output.outputs}) == 3
    assert [each.index for each in output.outputs] == [0, 1, 2]
    best = SamplingParams(
        best_of=3, temperature=1.0, seed=1, max_tokens=6, logprobs=0, ignore_eos=True
    )
    [chosen] = llm.generate("x", best, use_tqdm=False)
    likeliest = max(output.outputs, key=lambda each: each.cumulative_logprob or 0.0)
    assert chosen.outputs[0].token_ids == likeliest.token_ids


def test_logprobs_when_asked_for_are_those_of_the_model(
    llm: LLM, reference: LlamaForCausalLM
) -> None:
    [output] = llm.generate(
        "def fib(n):", SamplingParams(temperature=0.0, max_tokens=4, logprobs=2), use_tqdm=False
    )
    choice = output.outputs[0]
    with torch.inference_mode():
        logits = reference(torch.tensor([output.prompt_token_ids + choice.token_ids])).logits[0]
    rows = logits[len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
    assert choice.logprobs is not None
    for row, token, entries in zip(rows, choice.token_ids, choice.logprobs, strict=True):
        assert len(entries) == 2
        assert entries[token].logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert entries[token].rank == 1
    assert choice.cumulative_logprob == pytest.approx(
        sum(rows[i, token].item() for i, token in enumerate(choice.token_ids)), abs=1e-3
    )


def test_stop_string_ends_the_text_and_is_named(llm: LLM) -> None:
    whole = llm.generate("def fib(n):", GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = whole[8:11]
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=["never said", stop])
    choice = llm.generate("def fib(n):", params, use_tqdm=False)[0].outputs[0]
    assert choice.text == whole[: whole.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_stop_token_ends_the_text_and_is_named(llm: LLM) -> None:
    whole = llm.generate("def fib(n):", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    stop = whole[5]
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=[stop, 3])
    choice = llm.generate("def fib(n):", params, use_tqdm=False)[0].outputs[0]
    assert choice.token_ids == whole[: whole.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_stream_joined_equals_whole(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, n=2, logprobs=0)
    whole = llm.generate(PROMPTS, params, use_tqdm=False)
    texts = {(output.index, each.index): "" for output in whole for each in output.outputs}
    ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
    pieces = 0
    for output in llm.stream(PROMPTS, params):
        pieces += 1
        for each in output.outputs:
            assert each.token_ids or each.finish_reason
            texts[output.index, each.index] += each.text
            ids[output.index] += each.token_ids if each.index == 0 else []
    assert [*texts.values()] == text_of(whole)
    assert [*ids.values()] == [output.outputs[0].token_ids for output in whole]
    assert pieces > len(PROMPTS)


def test_chat_with_messages_renders_as_transformers(llm: LLM, pair: tuple[Path, Path]) -> None:
    chats = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "write code"}]]
    outputs = llm.chat(chats, GREEDY, use_tqdm=False)
    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    for chat, output in zip(chats, outputs, strict=True):
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert output.prompt_token_ids == ids
    assert text_of(llm.chat(chats[0], GREEDY, use_tqdm=False)) == text_of(outputs[:1])
    streamed = "".join(output.outputs[0].text for output in llm.stream_chat(chats[0], GREEDY))
    assert [streamed] == text_of(outputs[:1])


def test_chat_with_a_required_tool_answers_with_its_call(llm: LLM) -> None:
    parameters = {"properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    tool = {"type": "function", "function": {"name": "light", "parameters": parameters}}
    params = SamplingParams(temperature=0.0, max_tokens=200)
    chat = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(chat, params, use_tqdm=False, tools=[tool], tool_choice="required")
    message = output.outputs[0].message
    assert message is not None
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "light"
    assert isinstance(json.loads(call["function"]["arguments"])["on"], bool)
    assert llm.chat(chat, GREEDY, use_tqdm=False)[0].outputs[0].message is None


def test_generate_when_interrupted_leaves_nothing_behind(
    llm: LLM, shared_engine: LocalEngine
) -> None:
    endless = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        wait_until(lambda: bool(shared_engine._runs), 60, "requests to run")
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        thread.start()
        llm.generate([[2]] * 64, endless, use_tqdm=False)
    thread.join()
    assert not shared_engine._runs
    assert len(llm.generate("x", GREEDY, use_tqdm=False)) == 1


def test_stream_given_up_ends_its_requests(llm: LLM, shared_engine: LocalEngine) -> None:
    stream = llm.stream("x", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not shared_engine._runs


def test_request_that_is_refused_ends_the_others_with_its_error(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match="maximum context length is 512 tokens"):
        llm.generate([[2], [2] * 600], SamplingParams(max_tokens=400), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        llm.generate([[10**6]], use_tqdm=False)


def test_closed_llm_leaves_no_thread_and_refuses_requests(pair: tuple[Path, Path]) -> None:
    before, switch_s = set(threading.enumerate()), sys.getswitchinterval()
    thresholds = gc.get_threshold()
    with LLM(str(pair[1]), device="cpu", kv_cache_memory=16) as llm:
        llm.generate(["x"], SamplingParams(max_tokens=2))
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) <= before
    assert sys.getswitchinterval() == switch_s
    assert gc.get_threshold() == thresholds
    with pytest.raises(UnavailableError, match="closed"):
        llm.generate("x")


def test_close_keeps_collector_thresholds_that_the_program_set_meanwhile() -> None:
    before = gc.get_threshold()
    switching = Switching()
    try:
        switching.begin()
        gc.set_threshold(123, 4, 5)
        switching.end()
        assert gc.get_threshold() == (123, 4, 5)
    finally:
        gc.set_threshold(*before)


def test_close_when_interrupted_still_gives_everything_back(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, switch_s = set(threading.enumerate()), sys.getswitchinterval()
    thresholds = gc.get_threshold()
    llm = LLM(str(pair[1]), device="cpu", kv_cache_memory=16)
    engine = llm._model.engine

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_end_requests", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    assert set(threading.enumerate()) == before
    assert sys.getswitchinterval() == switch_s
    assert gc.get_threshold() == thresholds
    llm.close()


def test_engine_after_failed_steps_still_watches_for_one_that_hangs(
    shared_engine: LocalEngine,
) -> None:
    async def still_watching() -> bool:
        failed = shared_engine._core._hub.failed  # type: ignore[union-attr]
        failed.set()
        await asyncio.sleep(0.01)
        failed.clear()
        assert shared_engine._watching is not None
        return not shared_engine._watching.done()

    loop = shared_engine._loop
    assert asyncio.run_coroutine_threadsafe(still_watching(), loop).result(10)


def test_llm_that_is_forgotten_is_closed(
    engine: list[ScorerOptions],
    shared_engine: LocalEngine,
    pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(shared_engine, "dispose", lambda: closed.append(True))
    llm = LLM(str(pair[0]))
    assert len(engine) == 1
    del llm
    assert closed == [True]


def test_llm_that_cannot_load_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="no model folder"):
        LLM(str(tmp_path / "missing"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError):
        LLM(str(tmp_path))
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"tensor_parallel_size": 4},
            "^tensor_parallel_size=4 .* outrider serve MODEL --tensor-parallel-size N",
        ),
        ({"quantization": "awq"}, "quantization='awq' is not int8, fp8 or none"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2' is not auto, .*engine='vllm'"),
        ({"dtype": "int8"}, "^dtype int8 must be auto"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization: .* not a number above 0"),
        (
            {"max_num_seqs": 8, "max_num_batched_tokens": 4},
            "max_num_batched_tokens 4 is less than one token",
        ),
        ({"block_size": 0}, "^block_size: .* not a whole number"),
        (
            {"speculative_config": {"method": "ngram", "prompt_lookup_max": 0}},
            "^speculative_config: prompt_lookup_min must be at least 1, at most prompt_lookup_max",
        ),
        (
            {"speculative_config": {"method": "suffix", "suffix_decoding_max_spec_factor": 0}},
            "^speculative_config: suffix_decoding_max_spec_factor must be above 0",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs: .* not a whole number of at least 1"),
        ({"max_model_len": 0}, "max_model_len: .* not a whole number of at least 3"),
        ({"speculation_policy": "typo"}, "speculation_policy: .*adaptive.*fixed.*off"),
        ({"speculative_config": "ngram"}, "speculative_config: give an object"),
        ({"tensor_paralel_size": 1}, "takes no argument tensor_paralel_size"),
        ({"speculative_config": {"method": "lookahead"}}, "speculative_config: method 'lookahead'"),
        ({"speculative_config": {"method": "eagle"}}, "method eagle needs model"),
        ({"speculative_config": {"method": "ngram", "window": 2}}, "unrecognized .* window=2"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 500}},
            "num_speculative_tokens is a number from 0 to 128",
        ),
        (
            {"speculative_config": {"method": "ngram", "draft_tensor_parallel_size": 2}},
            "^speculative_config: draft_tensor_parallel_size 2: leave it out",
        ),
        (
            {"speculative_config": {"method": "ngram", "synthetic_acceptance_rates": [0.5]}},
            "^speculative_config: synthetic_acceptance_rates has 1 rates, but needs one rate for "
            r"each of 4 draft tokens \(num_speculative_tokens\)",
        ),
        (
            {"speculative_config": {"method": "ngram", "synthetic_acceptance_rates": "half"}},
            "^speculative_config: synthetic_acceptance_rates: .* no list of numbers",
        ),
        (
            {"speculative_config": {"method": "ngram", "synthetic_acceptance_length": 5.5}},
            "synthetic_acceptance_length 5.5 must lie between 1 and 5",
        ),
        (
            {"speculative_config": {"method": "ngram", "rejection_sample_method": "synthetic"}},
            "synthetic needs synthetic_acceptance_rates",
        ),
    ],
)
def test_argument_that_is_not_supported_is_refused_by_name(
    engine: list[ScorerOptions], pair: tuple[Path, Path], arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        LLM(str(pair[0]), **arguments)
    assert not engine


def test_synthetic_rates_of_vllm_are_taken(
    engine: list[ScorerOptions], pair: tuple[Path, Path]
) -> None:
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1, 0.5],
    }
    LLM(str(pair[0]), speculative_config=speculation)
    assert engine[0].synthetic_acceptance_rates == (1.0, 0.5)
    del speculation["synthetic_acceptance_rates"]
    LLM(str(pair[0]), speculative_config={**speculation, "synthetic_acceptance_length": 2.25})
    assert engine[1].synthetic_acceptance_rates == (1.0, 0.25)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"temperature": 3.0}, "temperature must be"),
        ({"n": 0}, "n must be"),
        ({"logprobs": 50}, "logprobs must be"),
        ({"prompt_logprobs": 50}, "prompt_logprobs must be"),
        ({"skip_special_tokens": False}, "skip_special_tokens=False is not supported"),
        ({"extra_args": {"wrong": 1}}, "Unrecognized request argument: wrong"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "exactly one"),
    ],
)
def test_sampling_params_out_of_range_are_refused_by_name(
    params: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        SamplingParams(**params)


def test_outrider_when_imported_imports_no_torch() -> None:
    code = "import sys, outrider; assert 'torch' not in sys.modules; outrider.SamplingParams"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert outrider.LLM is LLM
    assert "LLM" in dir(outrider)
    with pytest.raises(AttributeError, match="has no attribute 'LLm'"):
        outrider.LLm  # type: ignore[attr-defined] # noqa: B018
