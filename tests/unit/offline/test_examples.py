"""Programs written for LMDeploy and vLLM, with another import line and small models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from outrider.drafting.building.config import MethodConfig, NgramConfig
from outrider.errors import ConfigError
from scorer_service.config import ScorerOptions

EXAMPLES = Path(__file__).parent / "examples"
_IMPORT = re.compile(r"^from (vllm|lmdeploy)[.\w]* import", flags=re.MULTILINE)
_MODEL = re.compile(r"""(?<=['"])(facebook|meta-llama|deepseek-ai|yuhuili|ibm-fms)/[^'"]+""")


def run(name: str, models: dict[str, str], *, tp: str | None = None) -> None:
    """Run an example; `tp` stands in for its tensor parallelism, in any spelling."""
    source = _IMPORT.sub("from outrider import", (EXAMPLES / f"{name}.txt").read_text())
    source = _MODEL.sub(lambda found: models[found[0].partition("/")[0]], source)
    if tp is not None:
        source = re.sub(r"\b(tp|tensor_parallel_size)=\d+", rf"\1={tp}", source)
    exec(compile(source, name, "exec"), {"__name__": "__main__"})


@pytest.fixture
def models(pair: tuple[Path, Path], tmp_path: Path) -> dict[str, str]:
    """Folders that stand in for the publishers' models."""
    target, draft = map(str, pair)
    for kind in ("eagle", "mlp_speculator"):
        (tmp_path / kind).mkdir()
        config = {"model_type": kind, "architectures": ["LlamaForCausalLM"]}
        (tmp_path / kind / "config.json").write_text(json.dumps(config))
    return {
        "meta-llama": target,
        "deepseek-ai": target,
        "facebook": target,
        "yuhuili": str(tmp_path / "eagle"),
        "ibm-fms": str(tmp_path / "mlp_speculator"),
        "draft": draft,
    }


@pytest.mark.parametrize(
    ("name", "method", "tokens"),
    [
        ("lmdeploy_eagle3", "eagle3", 3),
        ("lmdeploy_mtp", "mtp", 3),
        ("vllm_ngram", "ngram", 5),
        ("vllm_eagle", "eagle", 2),
        ("vllm_suffix", "suffix", 15),
        ("vllm_0_draft_model", "draft_model", 5),
        ("vllm_0_ngram", "ngram", 5),
        ("vllm_0_mlp_speculator", "mlp_speculator", 4),
    ],
)
def test_example_runs_with_its_method(
    engine: list[ScorerOptions],
    models: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    name: str,
    method: str,
    tokens: int,
) -> None:
    if "tensor_parallel_size=4" in (source := (EXAMPLES / f"{name}.txt").read_text()):
        with pytest.raises(ConfigError, match="tensor_parallel_size=4 is not supported"):
            run(name, models)
    if "tp=16" in source:
        with pytest.raises(ConfigError, match=r"^tp=16 is not supported"):
            run(name, models)
    run(name, models, tp="1")
    [options] = engine
    drafter: MethodConfig = options.in_process_proposer[0]
    assert (drafter.name, options.num_speculative_tokens) == (method, tokens)
    if isinstance(drafter, NgramConfig):
        assert drafter.prompt_lookup_max == 4
    printed = capsys.readouterr().out
    if name.startswith("lmdeploy"):
        assert printed.count("Response(text=") == 2
        assert options.max_num_seqs == 128
    else:
        assert "Prompt: 'The future of AI is', Generated text: '" in printed
