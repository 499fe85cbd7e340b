from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import GenerationConfig, PytorchEngineConfig, pipeline
from outrider.errors import ConfigError
from outrider.offline.pipeline import Pipeline, Response


@pytest.fixture
def pipe(engine: list[object], pair: tuple[Path, Path]) -> Pipeline:
    loaded = pipeline(str(pair[0]), PytorchEngineConfig(device_type="cpu", max_batch_size=4))
    assert len(engine) == 1
    return loaded


def test_pipeline_with_any_input_answers_as_many(pipe: Pipeline) -> None:
    config = GenerationConfig(max_new_tokens=6, ignore_eos=True)
    one, several = pipe("hi", config), pipe(["hi", "code"], config)
    assert isinstance(one, Response)
    assert [response.index for response in several] == [0, 1]
    assert several[0].text == one.text
    assert (one.generate_token_len, one.finish_reason) == (6, "length")
    chat = [{"role": "user", "content": "hi"}]
    assert pipe(chat, config).text == one.text
    assert [response.text for response in pipe([chat, chat], config)] == [one.text] * 2
    assert pipe("hi", config, do_preprocess=False).input_token_len < one.input_token_len
    streamed = "".join(response.text for response in pipe.stream_infer("hi", config))
    assert streamed == one.text


def test_pipeline_unless_do_sample_is_set_is_greedy(pipe: Pipeline) -> None:
    def texts(**settings: object) -> list[str]:
        config = GenerationConfig(max_new_tokens=8, ignore_eos=True, **settings)  # type: ignore[arg-type]
        return [response.text for response in pipe(["hi", "hi"], config)]

    assert len(set(texts())) == 1
    assert len(set(texts(do_sample=True, temperature=1.5, top_k=0))) == 2
    assert len(set(texts(do_sample=True, temperature=1.5, top_k=0, random_seed=1))) == 1


def test_pipeline_setting_that_is_not_supported_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="quant_policy must be 0"):
        PytorchEngineConfig(quant_policy=8)


@pytest.mark.parametrize(
    ("settings", "others", "told"),
    [
        ({"max_batch_size": 0}, {}, "^max_batch_size: '0' is not"),
        ({"device_type": "xpu", "dtype": "int8"}, {}, "^dtype int8 must be"),
        ({"cache_max_entry_count": 2.0}, {}, "^cache_max_entry_count: '2.0' is not"),
        ({"session_len": 1}, {}, "^session_len: '1' is not"),
        ({"session_len": 64}, {"max_model_len": 1}, "^max_model_len: '1' is not"),
        (
            {"max_prefill_token_num": 1, "max_batch_size": 2},
            {},
            "^max_prefill_token_num 1 is .* or lower max_batch_size 2",
        ),
    ],
)
def test_pipeline_setting_out_of_range_is_refused_by_the_name_that_the_caller_wrote(
    settings: dict[str, Any], others: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        pipeline("embedded", PytorchEngineConfig(**settings), **others)
