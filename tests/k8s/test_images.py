"""The image, as far as it can be made without a container runtime."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.kubernetes import helm

DOCKERFILE = (helm.ROOT / "Dockerfile").read_text()
PACKAGES = {"gateway", "outrider", "proposer_service", "scorer_service"}
ON_OTHER_DEVICES = {"cuda", "flash_attn", "triton", "vllm"}  # where installed
TIMEOUT_S = 100
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)

ENVIRONMENT = os.environ | {
    "PATH": f"{helm.TOOLS}:{os.environ['PATH']}",
    "UV_NATIVE_TLS": "1",  # the machine's certificates, as pip takes them
}


def pins(*files: str) -> dict[str, str]:
    """Versions by package; no package is in two of the files."""
    lines = [
        line.lower().replace("_", "-").split("==")
        for file in files
        for line in (helm.ROOT / file).read_text().splitlines()
        if line and not line.startswith("#")
    ]
    versions = dict(lines)
    assert len(versions) == len(lines)
    return versions


ALL_PINS = pins("constraints.txt", "constraints-cuda.txt")


def test_dockerfile_when_linted_is_clean() -> None:
    done = helm.call("hadolint", helm.ROOT / "Dockerfile")
    assert done.returncode == 0, done.stdout + done.stderr


def test_dockerfile_is_pinned_and_unprivileged() -> None:
    (base,) = re.findall(r"^ARG PYTHON=(.+)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", base)
    assert DOCKERFILE.index("USER 10001:10001") < DOCKERFILE.index("ENTRYPOINT")
    assert re.search(r"uv==[\d.]+$", DOCKERFILE, re.MULTILINE)


def test_cuda_requirements_equal_the_pins() -> None:
    project = tomllib.loads((helm.ROOT / "pyproject.toml").read_text())["project"]
    for needed in project["optional-dependencies"]["cuda"]:
        name, _, version = re.fullmatch(r"([\w-]+)(\[\w+\])?([=>]=[\w.]+);.*", needed).groups()
        assert version in (f"=={ALL_PINS[name]}", f">={ALL_PINS[name].split('.')[0]}")
    assert {"torch", "triton", "nvidia-nccl-cu13"} <= ALL_PINS.keys()


def run(stage: str, opt: Path, context: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Runs the stage's RUN line, with another folder for /opt."""
    body = re.split(r"^FROM ", DOCKERFILE.split(f" AS {stage}\n")[1], flags=re.MULTILINE)[0]
    (line,) = re.findall(r"^RUN (uv .+)$", body, re.MULTILINE)
    # PyTorch's own index has the same versions, and is out of reach where PyPI is mirrored alone.
    line = line.replace(" --torch-backend cpu", "")
    return subprocess.run(
        [*shlex.split(line.replace("/opt", str(opt))), *more],
        cwd=context,
        env=ENVIRONMENT | {"VIRTUAL_ENV": str(opt / "python")},
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What .dockerignore lets through, copied, with weights of no bytes."""
    folder = tmp_path_factory.mktemp("src")

    def copy(source: str, target: str) -> None:
        if source.endswith(".safetensors"):  # packing them takes a minute
            Path(target).touch()
        else:
            shutil.copy(source, target)

    for line in (helm.ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            source, target = helm.ROOT / line[1:], folder / line[1:]
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, target, ignore=ignored, copy_function=copy)
            else:
                shutil.copy(source, target)
    return folder


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory, context: Path) -> Path:
    """/opt of the image, with an environment that lacks the packages still."""
    folder = tmp_path_factory.mktemp("opt")
    run("tools", folder, context)
    return folder


def imported(context: Path) -> set[str]:
    """Distributions that the packages in the image import, without those for CUDA alone."""
    line = re.compile(r"^ *(?:from|import) (\w+)[\w.]*(?: import .+| as \w+)?$", re.MULTILINE)
    names = {name for path in context.rglob("*.py") for name in line.findall(path.read_text())}
    names -= PACKAGES | ON_OTHER_DEVICES | set(sys.stdlib_module_names)
    found = importlib.metadata.packages_distributions()
    return {found[name][-1].lower().replace("_", "-") for name in names}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_packages_of_image_are_all_pinned(device: str, opt: Path, context: Path) -> None:
    done = run(f"packages-{device}", opt, context, "--dry-run")
    found = dict(re.findall(r"^ \+ ([\w-]+)==(\S+)$", done.stderr, re.MULTILINE))
    assert {"torch", "transformers", "grpcio"} <= imported(context) <= found.keys()
    assert ("flash-attn-4" in found) == (device == "cuda")
    beyond = found.keys() - pins("constraints.txt").keys() if device == "cpu" else set()  # CUDA's
    assert {name: found[name] for name in found.keys() - beyond}.items() <= ALL_PINS.items()


def test_packages_of_vllm_image_are_all_pinned(opt: Path, context: Path) -> None:
    done = run("packages-vllm", opt, context, "--dry-run")
    found = dict(re.findall(r"^ \+ ([\w-]+)==(\S+)$", done.stderr, re.MULTILINE))
    assert {"vllm", "torch", "transformers", "grpcio"} <= found.keys()
    assert found.items() <= pins("constraints-vllm.txt").items()


def test_caches_of_compiled_kernels_are_kept_where_a_claim_can_be() -> None:
    variables = dict(re.findall(r"^(?:ENV|   ) (\w+)=(\S+)", DOCKERFILE, re.MULTILINE))
    kept = {name for name, value in variables.items() if value.startswith("/var/cache/outrider")}
    assert kept >= {"HF_HOME", "TRITON_CACHE_DIR", "CUTE_DSL_CACHE_DIR", "NUMBA_CACHE_DIR"}
    assert "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR" in kept  # else /tmp/$USER, and there is no user
    assert variables["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"


def test_image_is_labelled_and_built_in_stages() -> None:
    assert len(re.findall(r"^FROM ", DOCKERFILE, re.MULTILINE)) > 5
    for label in ("title", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in DOCKERFILE


@pytest.mark.parametrize("workflow", sorted(helm.ROOT.glob(".github/workflows/*.yaml")))
def test_workflow_fits_its_schema(workflow: Path) -> None:
    done = helm.call("check-jsonschema", "--builtin-schema", "vendor.github-workflows", workflow)
    assert done.returncode == 0, done.stdout + done.stderr


def test_publishing_builds_every_image_and_scans_before_it_pushes() -> None:
    jobs = yaml.safe_load((helm.ROOT / ".github/workflows/publish.yaml").read_text())["jobs"]
    stages = set(re.findall(r"^FROM .* AS packages-(\w+)$", DOCKERFILE, re.MULTILINE))
    assert set(jobs["images"]["strategy"]["matrix"]["device"]) == stages
    uses = [step.get("uses", "").partition("@")[0] for step in jobs["images"]["steps"]]
    builds = [at for at, name in enumerate(uses) if name == "docker/build-push-action"]
    assert builds[0] < uses.index("aquasecurity/trivy-action") < builds[-1]
    pushed = jobs["images"]["steps"][builds[-1]]["with"]
    assert (pushed["push"], pushed["sbom"]) == (True, True)
    assert {"images", "install"} <= set(jobs["chart"]["needs"])
    scripts = " ".join(step.get("run", "") for step in jobs["install"]["steps"])
    assert "--values k8s/examples/kind.yaml" in scripts
    assert "helm test" in scripts


def test_image_when_run_serves_at_all_addresses(opt: Path, context: Path, tmp_path: Path) -> None:
    run("build", opt, context)
    installed = opt / "outrider"
    needed = [path.relative_to(context) for path in context.glob("*/**/*") if path.is_file()]
    needed = [path for path in needed if path.parts[0] in PACKAGES]
    assert {path.parts[0] for path in needed} == PACKAGES
    assert {path.suffix for path in needed} >= {".py", ".html", ".cu", ".safetensors"}
    assert [path for path in needed if not (installed / path).is_file()] == []
    assert "bin:/opt/python/bin:$PATH" in DOCKERFILE
    variables = dict(re.findall(r"^(?:ENV|   ) (\w+)=(\S+)", DOCKERFILE, re.MULTILINE))
    (entrypoint,) = re.findall(r'^ENTRYPOINT \["(\w+)"\]$', DOCKERFILE, re.MULTILINE)
    script = (installed / "bin" / entrypoint).read_text()
    assert script.startswith(f"#!{opt}/python/bin/python")
    done = subprocess.run(  # with this environment's packages
        [sys.executable, "-", "serve", "embedded", "--device", "cpu", "--dry-run"],
        input=script,
        env={
            "PYTHONPATH": str(installed),
            "HOME": str(tmp_path),
            "OUTRIDER_HOST": variables["OUTRIDER_HOST"],
        },
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=TIMEOUT_S,
    )
    gateway = next(line for line in done.stdout.splitlines() if line.startswith("gateway: "))
    assert "--host 0.0.0.0 --http-port 8000 --grpc-port 50051" in gateway
    assert "EXPOSE 8000 50051" in DOCKERFILE
