"""Models are downloaded ahead of a service, from a hub on loopback."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from outrider.models import fetch as fetching
from outrider.models.download import DownloadError

COMMIT = "0123456789012345678901234567890123456789"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "model.safetensors": b"weights",
    "training_log.csv": b"never wanted",
}
WEIGHT_MAP = {
    "model.embed_tokens.weight": "model-1-of-3.safetensors",
    "model.layers.0.mlp.up_proj.weight": "model-2-of-3.safetensors",
    "lm_head.weight": "model-3-of-3.safetensors",
}
REPOSITORIES = {
    "org/model": FILES,
    "org/module": {
        "config.json": b"{}",
        "pytorch_model.bin": b"weights",
        "training_args.bin": b"never wanted",
        "README.md": b"",
    },
    "org/parts": {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps({"weight_map": WEIGHT_MAP}).encode(),
        **dict.fromkeys(WEIGHT_MAP.values(), b"weights"),
    },
    "org/messy": {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "consolidated.safetensors": b"the same again",
        "original/params.json": b"{}",
        "../../../../../escaped.json": b"{}",
    },
}


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks for."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.removeprefix("/api/models")
        repository, name = "/".join(path.split("/")[1:3]), path.rpartition("/")[2]
        files = REPOSITORIES.get(repository, {})
        kind = path.removeprefix(f"/{repository}/").partition("/")[0]
        if kind == "revision" and files:
            siblings = [{"rfilename": file} for file in files]
            body = json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode()
        elif kind == "tree" and files:
            tree = [
                {"type": "file", "path": file, "size": len(content), "oid": COMMIT}
                for file, content in files.items()
            ]
            body = json.dumps(tree).encode()
        elif kind == "resolve" and name in files:
            body = files[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fetch(cache: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "outrider.models.fetch", *args],
        env=os.environ | {"HF_HOME": str(cache)} | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_fetch_then_service_finds_it_offline(tmp_path: Path) -> None:
    with hub() as endpoint:
        fetched = fetch(tmp_path, "org/model", HF_ENDPOINT=endpoint)
    assert fetched.returncode == 0, fetched.stderr
    folder = Path(fetched.stdout.strip())
    wanted = set(FILES) - {"training_log.csv"}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in wanted
    }
    offline = fetch(tmp_path, "org/model", HF_HUB_OFFLINE="1")
    assert offline.stdout == fetched.stdout, offline.stderr


def test_fetch_tokenizer_comes_without_weights(tmp_path: Path) -> None:
    with hub() as endpoint:
        fetched = fetch(tmp_path, "org/model", "--tokenizer-only", HF_ENDPOINT=endpoint)
    assert fetched.returncode == 0, fetched.stderr
    names = {path.name for path in Path(fetched.stdout.strip()).iterdir()}
    assert names == {"config.json", "tokenizer.json"}


def test_fetch_module_comes_with_shared_weights(tmp_path: Path) -> None:
    wanted = ("org/module", "--module-of", "org/parts")
    with hub() as endpoint:
        fetched = fetch(tmp_path, *wanted, HF_ENDPOINT=endpoint)
    assert fetched.returncode == 0, fetched.stderr
    module, target = map(Path, fetched.stdout.split())
    assert {path.name for path in module.iterdir()} == {"config.json", "pytorch_model.bin"}
    assert {path.name for path in target.iterdir()} == {
        *("config.json", "model.safetensors.index.json"),
        *("model-1-of-3.safetensors", "model-3-of-3.safetensors"),
    }
    offline = fetch(tmp_path, *wanted, HF_HUB_OFFLINE="1")
    assert offline.stdout == fetched.stdout, offline.stderr


def test_fetch_leaves_what_nobody_reads_and_what_lies_elsewhere(tmp_path: Path) -> None:
    with hub() as endpoint:
        fetched = fetch(tmp_path / "a" / "b", "org/messy", HF_ENDPOINT=endpoint)
    assert fetched.returncode == 0, fetched.stderr
    names = {path.name for path in Path(fetched.stdout.strip()).iterdir()}
    assert names == {"config.json", "model.safetensors"}
    assert not list(tmp_path.rglob("escaped.json"))


@contextmanager
def raw_hub(answer: bytes) -> Iterator[str]:
    """A hub that says `answer` to everything, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def _http(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"not HTTP at all\r\n\r\n",
        _http("200 OK", b"<html>sign in to this network</html>"),
        _http("200 OK", b"[" * 100_000),
        _http("200 OK", b'{"id": 1, "sha": ["x"], "siblings": 3}'),
        _http("200 OK", b"{}"),
        _http("302 Found", b"", "Location: /again"),
    ],
)
def test_fetch_from_a_hub_that_answers_nonsense_prints_one_line(
    answer: bytes, tmp_path: Path
) -> None:
    with raw_hub(answer) as endpoint:
        done = fetch(tmp_path, "org/model", HF_ENDPOINT=endpoint)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("fetch: org/model is not a folder here and cannot be downloaded")
    assert done.stderr.count("\n") == 1


def test_fetch_says_neither_signatures_nor_control_characters(tmp_path: Path) -> None:
    said = "X-Error-Message: \x1b[2Jgo to https://cdn.example/blob?Signature=secret now"
    with raw_hub(_http("403 Forbidden", b"", said)) as endpoint:
        done = fetch(tmp_path, "org/model", HF_ENDPOINT=endpoint)
    assert done.returncode == 2
    assert "secret" not in done.stderr
    assert done.stderr.rstrip("\n").isprintable()
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "soon"])
def test_fetch_with_an_endless_time_to_try_is_refused(seconds: str, tmp_path: Path) -> None:
    done = fetch(tmp_path, "org/model", "--retry-seconds", seconds)
    assert done.returncode == 2
    assert "is not a number from 0" in done.stderr


def test_fetch_missing_model_prints_one_line(tmp_path: Path) -> None:
    with hub() as endpoint:
        # Trying again would bring nothing.
        done = fetch(tmp_path, "org/other", "--retry-seconds", "3600", HF_ENDPOINT=endpoint)
    assert done.returncode == 2
    assert done.stderr.startswith("fetch: org/other is not a folder here")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("args", [[], ["org/model", "--retry-seconds", "-1"], ["a", "b"]])
def test_fetch_with_a_wrong_command_line_is_refused_in_one_line(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetching.main(args) == 2
    said = capsys.readouterr().err
    assert said.startswith("fetch: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(("seconds", "code"), [("60", 0), ("0", 2)])
def test_fetch_with_a_broken_network_tries_again_while_it_may(
    seconds: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [OSError("connection reset"), OSError("name resolution")]

    def resolve(*_: object, **__: object) -> Path:
        if broken:
            raise DownloadError(str(broken.pop()), may_pass=True)
        return Path("/cache/model")

    monkeypatch.setattr(fetching, "resolve_model", resolve)
    monkeypatch.setattr(fetching, "end_at_sigterm", lambda: None)
    monkeypatch.setattr(fetching, "_PAUSE_S", 0.001)
    assert fetching.main(["org/model", "--retry-seconds", seconds]) == code
    printed = capsys.readouterr()
    assert printed.out == ("" if code else "/cache/model\n")
    said = ["fetch: name resolution\n", "fetch: connection reset\n"]
    assert printed.err == "".join(said[: 1 if code else 2])


@contextmanager
def downloading(cache: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """What asks a hub that does not answer."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(60)
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        patient = {"HF_HUB_ETAG_TIMEOUT": "300", "HF_HUB_DOWNLOAD_TIMEOUT": "300"}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *args],
            env=os.environ | {"HF_HOME": str(cache), "HF_ENDPOINT": endpoint} | patient,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            with listening.accept()[0]:
                yield process
        finally:
            process.kill()
            process.communicate(timeout=10)


@pytest.mark.parametrize(
    "args",
    [
        ["outrider.models.fetch", "org/model"],  # also as a container's first process
        ["scorer_service", "--model=org/model"],
        ["gateway", "--model=org/model", "--scorer=127.0.0.1:1"],
    ],
)
def test_fetch_on_sigterm_ends(args: list[str], tmp_path: Path) -> None:
    with downloading(tmp_path, *args) as process:
        process.terminate()
        assert process.wait(10) == 143


def test_download_counts_as_part_of_the_start(tmp_path: Path) -> None:
    with downloading(
        tmp_path, "scorer_service", "--model=org/model", "--start-timeout=0.5"
    ) as process:
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "was not ready within" in errors
