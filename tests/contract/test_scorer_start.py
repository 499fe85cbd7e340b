"""A scorer that cannot start says why."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from outrider.errors import ConfigError, DeadlineError
from outrider.rpc.data_connection import DataPort
from outrider.rpc.server import GrpcServer
from scorer_service.__main__ import main, resolve
from scorer_service.app import ScorerApp
from scorer_service.config import ScorerOptions
from scorer_service.loading import load
from tests.support.checkpoints.broken import write_whole
from tests.support.services.scorer import running_scorer


def _refused(flag: str) -> str:
    """What a scorer with this flag says before it ends."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "scorer_service", flag],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr


async def test_scorer_start_beyond_its_timeout_fails(tmp_path: Path) -> None:
    flags = resolve([f"--model={write_whole(tmp_path)}", "--start-timeout=0.001"])
    del flags["exit_with_parent"]
    before = {*threading.enumerate()}
    scorer = ScorerApp(ScorerOptions(**flags))
    try:
        with pytest.raises(DeadlineError, match="was not ready within 0 s"):
            await scorer.start()
    finally:
        await scorer.stop()
    for thread in {*threading.enumerate()} - before:  # that of the engine, which loads
        await asyncio.to_thread(thread.join, 60)


@pytest.mark.parametrize("mib", [10**8, 10**14])
def test_scorer_start_with_cache_beyond_memory_is_refused_by_name(mib: int, tmp_path: Path) -> None:
    flags = resolve([f"--kv-cache-memory={mib}"])
    del flags["exit_with_parent"]
    with pytest.raises(ConfigError, match=f"--kv-cache-memory {mib} do not fit"):
        load(write_whole(tmp_path), ScorerOptions(**flags))


def test_scorer_start_with_broken_tokenizer_fails_before_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("[]")
    assert "tokenizer.json is no tokenizer" in _refused(f"--model={tmp_path}")


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "cuda:x", "cpu:"])
def test_scorer_start_on_missing_device_is_refused_by_name(device: str) -> None:
    flags = resolve(["--device", device])
    del flags["exit_with_parent"]
    with pytest.raises(ConfigError, match=f"--device {device}"):
        load(Path(), ScorerOptions(**flags))


async def test_scorer_start_with_longest_socket_path_listens() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = resolve(["--listen-unix", f"{folder}/".ljust(97, "s")])["listen_unix"]
        async with running_scorer(unix_path=Path(path)):
            assert sorted(os.listdir(folder)) == [Path(path).name, f"{Path(path).name}.data"]


def test_scorer_start_with_longer_socket_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--listen-unix: '/run/s.* is longer than 97 bytes"):
        resolve(["--listen-unix", "/run/".ljust(98, "s")])


async def test_scorer_start_leaves_another_scorer_its_sockets(tmp_path: Path) -> None:
    path = tmp_path / "s"
    flags = resolve([f"--model={write_whole(tmp_path / 'model')}", f"--listen-unix={path}"])
    del flags["exit_with_parent"]
    async with running_scorer(unix_path=path):
        before = [os.stat(each).st_ino for each in (path, f"{path}.data")]
        second = ScorerApp(ScorerOptions(**flags))
        with pytest.raises(ConfigError, match=f"cannot listen on unix:{path}: another server does"):
            await second.start()
        await second.stop()
        assert [os.stat(each).st_ino for each in (path, f"{path}.data")] == before


async def test_scorer_start_leaves_a_busy_server_its_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    server = GrpcServer("127.0.0.1:0", lambda _: None, ["a.Service"], unix_path=path)
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(path)
        busy.listen(0)
        waiting.connect(path)
        with pytest.raises(ConfigError, match="another server does"):
            await server.start()
    await server.start()  # what a killed server leaves is no hindrance
    await server.stop(0)


async def test_scorer_start_with_a_file_in_its_sockets_place_says_so(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    server = GrpcServer("127.0.0.1:0", lambda _: None, ["a.Service"], unix_path=str(path))
    with pytest.raises(ConfigError, match="nothing but a socket may lie there"):
        await server.start()
    data = DataPort("127.0.0.1", 0, unix_path=str(tmp_path / "nowhere" / "s"))
    with pytest.raises(ConfigError, match="nothing but a socket may lie there"):
        await data.start()
    await data.stop()
    with pytest.raises(ConfigError, match="--listen-unix: must not be empty"):
        resolve(["--listen-unix", ""])


def test_scorer_start_on_another_machine_with_wrong_flags_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engines.has_vllm", lambda: True)
    assert main(["--engine=vllm", "--device=cuda:1", "--nnodes=2", "--node-rank=1"]) == 2
    assert "scorer: --device cuda:1 cannot be given with --engine vllm" in capsys.readouterr().err


def test_flag_of_the_native_engine_names_what_vllm_has_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.engines.has_vllm", lambda: True)
    instead = "give its own after --, as -- --attention-backend"
    with pytest.raises(ConfigError, match=instead):
        resolve(["--engine=vllm", "--attention-backend=flash"])
