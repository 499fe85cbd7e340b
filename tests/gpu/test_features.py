"""Hidden states on a device: captured in captured steps, gathered and copied to the host."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from outrider.engine.cuda.sampling import choose_and_verify
from outrider.engine.graphs.capture import CudaGraphs
from outrider.engine.graphs.decode_buckets import make_buckets
from outrider.engine.graphs.decode_graphs import DecodeGraphs
from outrider.engine.model.loader import ModelOptions, build_paged_model
from outrider.engine.runner import Runner, StepRunner
from outrider.features import FeatureSpec
from tests.support.models.architectures import ARCHITECTURES, random_model
from tests.support.services.sent_features import K, write

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_feature_rows_on_gpu_equal_transformers(captured: bool, projected: bool) -> None:
    source: Any = random_model(ARCHITECTURES["llama"], torch.float32)
    size, layers = source.config.hidden_size, source.config.num_hidden_layers
    spec = FeatureSpec(size, (0, 1), final_norm=True)
    shared = [5, 6, 7, 8, 9, 10, 11, 12]
    prompts = [[*shared, 1], [*shared, 2, 3, 4], [7] * 19]
    on_device = copy.deepcopy(source).to("cuda")
    model = build_paged_model(on_device, ModelOptions(page_size=4, num_pages=64, features=spec))
    runner: StepRunner = Runner(model)
    if captured:
        runner = DecodeGraphs(
            model,
            make_buckets(4, (1, K + 1)),
            capture=CudaGraphs(),
            choose_and_verify=choose_and_verify,
        )
    asked, matrix = spec, None
    if projected:
        matrix = torch.eye(size, spec.captured_width, dtype=torch.bfloat16)
        asked = replace(spec, projection_dim=size, projection_sha256=bytes(32))
    texts, rows = write(model, runner, prompts, asked, matrix)
    for text, got in zip(texts, rows, strict=True):
        assert len(text) - len(got) <= K + 2
        with torch.inference_mode():
            states = source(torch.tensor([text]), output_hidden_states=True).hidden_states
        wanted = torch.cat([states[0][0], states[1][0], states[layers][0]], dim=1)
        wanted = wanted[: len(got), : asked.width]
        torch.testing.assert_close(got, wanted, rtol=2**-6, atol=1e-2)
