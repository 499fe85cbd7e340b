"""The images, as far as they can be made without a container runtime."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support.kubernetes import helm

DOCKERFILES = sorted((helm.ROOT / "k8s/images").glob("*.Dockerfile"))
TIMEOUT_S = 100
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)

ENVIRONMENT = os.environ | {"PATH": f"{helm.TOOLS}:{os.environ['PATH']}"}

IMPORT_ALL = """
import importlib, pkgutil
for name in ("gateway", "outrider.models", "outrider.rpc", "outrider.v1"):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
try:
    import torch
except ImportError:
    print("complete, without torch")
"""


def test_dockerfile_when_linted_is_clean() -> None:
    done = helm.call("hadolint", *DOCKERFILES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_dockerfile_of_every_image_is_pinned_and_unprivileged(path: Path) -> None:
    text = path.read_text()
    (base,) = re.findall(r"^ARG PYTHON=(.+)$", text, re.MULTILINE)
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", base)
    assert text.index("USER 10001:10001") < text.index("ENTRYPOINT")
    assert re.search(r"uv==[\d.]+$", text, re.MULTILINE)


def test_gateway_image_requirements_equal_the_projects() -> None:
    names = (helm.ROOT / "k8s/images/gateway.txt").read_text().split("constraints.txt.")[1].split()
    pinned = (helm.ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    project = tomllib.loads((helm.ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=;]", name)[0] for name in project["dependencies"]}
    assert set(names) <= needed
    assert not [name for name in names if f"\n{name.replace('_', '-')}==" not in pinned]


def test_cuda_image_requirements_equal_the_pins() -> None:
    lines = [
        line.split("==")
        for file in ("constraints.txt", "k8s/images/cuda.txt")
        for line in (helm.ROOT / file).read_text().splitlines()
        if line and not line.startswith("#")
    ]
    pins = {name.lower().replace("_", "-"): version for name, version in lines}
    assert len(pins) == len(lines)
    project = tomllib.loads((helm.ROOT / "pyproject.toml").read_text())["project"]
    for needed in project["optional-dependencies"]["cuda"]:
        name, _, version = re.fullmatch(r"([\w-]+)(\[\w+\])?([=>]=[\w.]+);.*", needed).groups()
        assert version in (f"=={pins[name]}", f">={pins[name].split('.')[0]}")
    assert {"torch", "triton", "nvidia-nccl-cu13"} <= pins.keys()


def copy_context(context: Path) -> Path:
    """What .dockerignore lets through, copied."""
    ignored = shutil.ignore_patterns("__pycache__")
    for line in (helm.ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            source, target = helm.ROOT / line[1:], context / line[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=ignored)
            else:
                shutil.copy(source, target)
    return context


@pytest.fixture(scope="module")
def gateway_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """/opt of the gateway's image, made by its RUN lines from what .dockerignore lets through."""
    folder = tmp_path_factory.mktemp("image")
    context, prefix = copy_context(folder / "src"), folder / "opt"
    text = (helm.ROOT / "k8s/images/gateway.Dockerfile").read_text()
    lines = re.findall(r"^RUN (k8s/images/install.sh .+)$", text, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        subprocess.run(
            line.replace("/opt", str(prefix)).split(),
            cwd=context,
            env=ENVIRONMENT,
            check=True,
            timeout=TIMEOUT_S,
        )
    return prefix


def run(image: Path, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """The image's Python, as its ENV sets it up."""
    return subprocess.run(
        [image / "python/bin/python", *args],
        env={"PYTHONPATH": str(image / "outrider"), "HOME": str(cwd)},
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=TIMEOUT_S,
    )


def test_gateway_image_when_built_holds_its_imports(gateway_image: Path, tmp_path: Path) -> None:
    done = run(gateway_image, tmp_path, "-P", "-c", IMPORT_ALL)
    assert done.stdout.strip() == "complete, without torch", done.stderr


def test_gateway_image_when_run_starts(gateway_image: Path, tmp_path: Path) -> None:
    text = (helm.ROOT / "k8s/images/gateway.Dockerfile").read_text()
    (entrypoint,) = re.findall(r"^ENTRYPOINT \[(.+)\]$", text, re.MULTILINE)
    python, *args = (word.strip('" ') for word in entrypoint.split(","))
    assert python == "python"
    done = run(gateway_image, tmp_path, *args, "--scorer=127.0.0.1:1", "--start-timeout=0.1")
    assert done.returncode == 2
    assert "no scorer served" in done.stderr  # so it got past its tokenizer
    assert not list(gateway_image.glob("**/*.safetensors"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engine_images_when_built_hold_their_services(tmp_path: Path) -> None:
    services = tmp_path / "opt"
    step = ["k8s/images/install.sh", "services", "cpu", services]
    subprocess.run(step, cwd=copy_context(tmp_path / "src"), env=ENVIRONMENT, check=True)
    for path in ("scorer_service", "proposer_service", "outrider/models/data/draft"):
        assert (services / path).is_dir()
    assert list(services.glob("outrider/models/data/target/*.safetensors"))
