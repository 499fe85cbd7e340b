"""The names of vLLM that the plug-in touches are where it looks for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.vllm import versions
from tests.vllm.conftest import PLUGIN, TARGET

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


def test_adapter_finds_every_name_in_this_version() -> None:
    import vllm

    assert versions.missing_names() == [], f"vLLM {vllm.__version__} moved them"
    assert versions.missing_names(versions.AHEAD) == [], "what --async-scheduling needs moved"
    assert versions.missing_names(versions.STATES) == [], "what --hidden-features needs moved"
    assert vllm.__version__.startswith(versions.SUPPORTED), "a version that was not tried"


def test_low_temperature_is_the_requests_own() -> None:
    """As in the native engine: vLLM raises it to 0.01."""
    from outrider.vllm.async_llm import stream

    class Engine:
        def generate(self, _: object, params: Any, **__: object) -> None:
            self.params = params

    engine = Engine()
    stream(cast("Any", engine), "a", [1], {"temperature": 0.001}, None)
    assert engine.params.temperature == 0.001


def test_replicas_of_a_dense_model_listen_at_ports_of_their_own() -> None:
    """vLLM gives each of them rank 0."""
    from vllm.engine.arg_utils import EngineArgs

    from outrider.vllm.adapter import read_config

    args = EngineArgs(str(TARGET), dtype="float32", speculative_config=PLUGIN)
    config = args.create_engine_config()
    config.parallel_config.data_parallel_index = 1
    assert read_config(config).replica == 1


def test_places_of_draft_tokens_are_where_vllm_reads_them() -> None:
    """Prompts, parts of prompts and rows without drafts lie between them."""
    import numpy as np
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from outrider.vllm.adapter import draft_places

    runner: Any = object.__new__(GPUModelRunner)
    runner.device = torch.device("cpu")
    runner.arange_np, runner._arange_scratch = np.arange(512), np.zeros(512, np.int32)
    runner.input_ids = SimpleNamespace(gpu=torch.arange(512, dtype=torch.int32))
    drafted = np.array([3, 0, 2, 0, 1], np.int32)
    ends = np.array([4, 104, 107, 207, 212], np.int32)  # the last row has a part of its text again
    metadata = runner._calc_spec_decode_metadata(drafted, ends)
    places = draft_places(metadata)
    assert places.dtype == torch.int64
    assert places.tolist() == metadata.draft_token_ids.tolist() == [1, 2, 3, 105, 106, 211]
    assert metadata.draft_token_ids.dtype == torch.int32
    assert metadata.draft_token_ids.is_contiguous()
    assert metadata.num_draft_tokens == drafted.tolist()
