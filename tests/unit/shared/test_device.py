"""The name of a device is the same in all processes on it, and another elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outrider import device
from outrider.device import device_id
from outrider.drafting.building.config import DraftModelConfig, NgramConfig
from proposer_service.config import ProposerConfig


@pytest.mark.skipif(sys.platform != "linux", reason="others say no boot id")
def test_device_name_on_cpu_is_the_same_for_all_processes() -> None:
    there = subprocess.check_output(
        [sys.executable, "-c", "from outrider.device import device_id; print(device_id('cpu'))"],
        text=True,
        timeout=60,
    )
    assert there.strip() == device_id("cpu") != ""


def test_device_name_of_gpu_is_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = {"cuda": "GPU-0", "cuda:1": "GPU-1"}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda name: SimpleNamespace(uuid=uuids[name])
    )
    assert [device_id(name) for name in uuids] == ["GPU-0", "GPU-1"]


def test_device_name_without_boot_id_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "_BOOT_ID", tmp_path / "none")
    assert device_id("cpu") == ""


def test_device_name_of_proposer_is_its_models() -> None:
    on_gpu = DraftModelConfig(device="cuda")
    for methods, expected in (
        ((NgramConfig(),), "cpu"),
        ((DraftModelConfig(),), "cpu"),
        ((NgramConfig(), on_gpu), "cuda"),
    ):
        assert ProposerConfig(("127.0.0.1:1",), methods).device == expected
