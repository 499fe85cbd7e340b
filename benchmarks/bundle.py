"""Pack what a GPU machine without a package index lacks into parts of a bounded size.

    python -m benchmarks.bundle attention stack weights vllm --present LIST

The parts are `.part1/`, `.part2/`, ... , each at most `--part-mib` large. On the other machine,
`unpack.sh DEST` of every part, in any order, keeps the part, and unpacks a bundle into
DEST/<bundle> once all its parts are there. `DEST/env.sh` then sets PYTHONPATH. A packed bundle is
kept in the cache and used again until it is deleted there. It needs `uv` (to resolve for another
Python) and `pip`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.processes import REPO
from benchmarks.lib.program import arguments

_UNPACK = REPO / "benchmarks" / "unpack.sh"
_SUFFIX = ".tar.gz"
_PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


@dataclass(frozen=True)
class Wheels:
    """Wheels that are unzipped into one folder, because some share a package."""

    requirements: tuple[str, ...]
    resolve: bool = True  # also what they need; False: just these
    constraints: bool = False  # with the versions of constraints.txt
    always: frozenset[str] = frozenset()  # even if present there: it may be older than we need
    skip: tuple[str, ...] = ()  # names (globs) that our use does without
    drop: tuple[str, ...] = ()  # files (globs) likewise


WHEELS = {
    # flash-attn-4 with a page table.
    "attention": Wheels(
        (
            *("flash-attn-4==4.0.0b36", "apache-tvm-ffi==0.1.15", "torch-c-dlpack-ext==0.1.5"),
            *("nvidia-cutlass-dsl==4.8.1", "quack-kernels==0.6.5"),
            *(f"nvidia-cutlass-dsl-libs-{part}==4.8.1" for part in ("base", "core", "cu13")),
        ),
        resolve=False,
    ),
    # What Outrider's services import. The generated code needs a protobuf as new as its compiler.
    "stack": Wheels(
        (),  # pyproject.toml's
        constraints=True,
        always=frozenset({"grpcio", "protobuf", "typing-extensions"}),
        skip=("nvidia-*",),  # a newer torch wants them; that machine keeps its own
    ),
    # What tests/gpu needs beside it.
    "tests": Wheels(
        ("pytest>=9", "pytest-asyncio", "pytest-timeout"),
        always=frozenset({"pytest", "pluggy", "iniconfig"}),
    ),
    # The peer, as far as plain decoding and draft models on Hopper need it.
    "vllm": Wheels(
        ("vllm==0.23.0", "xgrammar==0.2.0", "openai<2.40", "mcp<2"),
        skip=(
            *("flashinfer-cubin", "tilelang", "tokenspeed-*", "z3-solver"),
            *("nvidia-c*", "nvidia-n*", "quack-kernels", "torch-c-dlpack-ext", "cuda-*"),
            *("opencv-*", "fastsafetensors", "opentelemetry-exporter-otlp*"),
            *("sentry-sdk", "supervisor"),
        ),
        drop=(
            *("vllm/vllm-rs", "vllm/third_party/deep_gemm/*", "pycountry/locales/*"),
            *("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "xgrammar/lib/*.a"),
            "mistral_common/data/*token*",
            "mistral_common/data/tekken*",
        ),
    ),
}
WEIGHTS = "weights"


def main() -> int:
    """Pack the bundles and print the contents of each part."""
    p = arguments("benchmarks.bundle", __doc__)
    p.add_argument("bundle", nargs="+", choices=[*WHEELS, WEIGHTS], help="packed in this order")
    p.add_argument("--present", type=Path, help="`pip list --format=freeze` of that machine")
    p.add_argument("--python", default="3.12", help="that machine's Python")
    p.add_argument("--part-mib", type=int, default=50)
    p.add_argument("--cache", type=Path, default=REPO / ".whl", help="wheels and packed bundles")
    p.add_argument("--out", type=Path, default=REPO, help="the parts' parent folder")
    args = p.parse_args()
    present = _names(args.present.read_text()) if args.present else frozenset()
    args.cache.mkdir(parents=True, exist_ok=True)
    archives = []
    for name in args.bundle:
        archives.append(args.cache / f"{name}{_SUFFIX}")
        if archives[-1].exists():
            continue
        with tempfile.TemporaryDirectory(prefix="bundle-") as work:
            tree = Path(work, name)
            if name == WEIGHTS:
                _copy_weights(tree)
            else:
                _unzip(WHEELS[name], _wheels(name, args.python, present, args.cache), tree)
            shutil.move(_pack(tree), archives[-1])
    for part in args.out.glob(".part[0-9]*"):
        shutil.rmtree(part)
    _cut(archives, args.part_mib * 2**20, args.out)
    return 0


def _wheels(name: str, python: str, present: frozenset[str], cache: Path) -> Iterator[Path]:
    """Download the bundle's wheels for `python` on Linux x86-64, less those in `present`."""
    bundle = WHEELS[name]
    pins = list(bundle.requirements)
    if bundle.resolve:
        leave_out = present - bundle.always
        pins = [
            pin
            for pin in _resolve(name, python)
            if _name(pin) not in leave_out and not _matches(_name(pin), bundle.skip)
        ]
    folder = cache / name
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "--dest", str(folder), *pins], check=True)
    yield from sorted(folder.glob("*.whl"))


def _resolve(name: str, python: str) -> list[str]:
    """Return pins for all that a bundle's requirements need."""
    bundle = WHEELS[name]
    command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_39"]
    command += ["--only-binary", ":all:"]
    source = "-" if bundle.requirements else str(REPO / "pyproject.toml")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        if bundle.constraints:
            # The other machine's torch stays; it decides the versions of what comes with it.
            ours = (REPO / "constraints.txt").read_text().splitlines()
            kept = [line for line in ours if not line.startswith(("torch==", "#"))]
            file.write("\n".join(kept))
            file.flush()
        command += ["-c", file.name, source]
        text, pipe = "\n".join(bundle.requirements), subprocess.PIPE
        done = subprocess.run(command, input=text, stdout=pipe, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "==" in line]


def _name(pin: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>\[; ]", pin, maxsplit=1)[0]).lower()


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, glob) for glob in globs)


def _names(frozen: str) -> frozenset[str]:
    return frozenset(_name(line.strip()) for line in frozen.splitlines() if line.strip())


def _unzip(bundle: Wheels, wheels: Iterator[Path], tree: Path) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            kept = [n for n in archive.namelist() if not _matches(n, bundle.drop)]
            archive.extractall(tree, kept)


def _copy_weights(tree: Path) -> None:
    data = REPO / "outrider" / "models" / "data"
    for source in data.glob("*/*.safetensors"):
        destination = tree / source.relative_to(data)
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, destination)


def _pack(tree: Path) -> Path:
    packed = tree.with_suffix(_SUFFIX)
    with tarfile.open(packed, "w:gz", compresslevel=3) as tar:
        tar.add(tree, arcname=".")
    return packed


def _cut(archives: Sequence[Path], part_bytes: int, out: Path) -> None:
    """Fill the parts one after the other and cut archives anywhere."""
    number, left = 0, 0
    for archive in archives:
        data = archive.read_bytes()
        sums, index, at = [], 0, 0
        holders: set[int] = set()
        while at < len(data):
            if left < min(2**20, len(data) - at):  # no crumbs
                number, left = number + 1, part_bytes
                folder = out / f".part{number}"
                folder.mkdir(parents=True)
                shutil.copy(_UNPACK, folder / "unpack.sh")
            chunk = data[at : at + left]
            file = f"{archive.name}.{index:02d}"
            (out / f".part{number}" / file).write_bytes(chunk)
            sums.append(f"{hashlib.sha256(chunk).hexdigest()}  {file}\n")
            print(f".part{number}  {len(chunk) / 2**20:6.1f} MiB  {file}")
            holders.add(number)
            index, at, left = index + 1, at + len(chunk), left - len(chunk)
        for holder in holders:
            (out / f".part{holder}" / f"{archive.name}.sums").write_text("".join(sums))


if __name__ == "__main__":
    sys.exit(main())
