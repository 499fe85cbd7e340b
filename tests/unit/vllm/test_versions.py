"""A vLLM that cannot be used is refused in one line, with its version."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from outrider.errors import ConfigError
from outrider.models.resolve import resolve_model
from outrider.vllm import versions
from outrider.vllm.engine import VllmEngine
from outrider.vllm.flags import VllmOptions


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, r"vLLM cannot be used: .*Install it anew: pip install 'outrider\[vllm\]'\.$"),
        ("0.9.2", "vLLM cannot be used: .*vLLM 0.9.2 was not tried .*: 0.23 and 0.32 were.$"),
    ],
    ids=["broken", "of another version"],
)
def test_vllm_that_cannot_be_imported_ends_the_start_with_the_reason(
    version: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "outrider.vllm.async_llm", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", vllm_of(version) if version else None)
    folder = Path(resolve_model("embedded", "target"))
    engine = VllmEngine(lambda: folder, VllmOptions("model", "name", "float32"), print)
    with pytest.raises(ConfigError, match=reason):
        engine.start(1.0)
    engine.stop(1.0)


def test_weights_that_are_not_the_float8_of_config_json_end_the_start(tmp_path: Path) -> None:
    """vLLM serves them, as nonsense."""
    folder = Path(resolve_model("embedded", "target"))
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = VllmEngine(lambda: tmp_path, VllmOptions("model", "name", "float32"), print)
    with pytest.raises(ConfigError, match="no tensor in it is of 8 bits"):
        engine.start(1.0)
    engine.stop(1.0)


@pytest.mark.parametrize("version", versions.SUPPORTED)
def test_version_that_was_tried_is_not_warned_of(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", vllm_of(f"{version}.1"))
    assert versions.untried() == ""


def vllm_of(version: str) -> ModuleType:
    module = ModuleType("vllm")
    module.__version__ = version  # type: ignore[attr-defined]
    return module
