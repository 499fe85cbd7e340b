"""Collect permissively licensed Python text from wheels, and hold some packages out.

`packages.txt` pins every package, with the licence read from its metadata and its role. Wheels
are downloaded with pip; only `.py`, `.md` and `.rst` files are read from them.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from training.config import ASSISTANT, END, USER

HERE = Path(__file__).parent
PER_PACKAGE_BYTES = 9_000_000
TOTAL_CHARACTERS = 240_000_000
MAX_FILE, MIN_FILE, MAX_LINE = 200_000, 200, 600
ALLOWED = re.compile(
    r"\b(MIT|MIT-CMU|0?BSD|Apache|ASL|PSF|Python Software Foundation|ISC|Unlicense|CC0|HPND|Zlib"
    r"|Public Domain)\b",
    re.I,
)
REFUSED = re.compile(
    r"GPL|GNU|MPL|Mozilla|EPL|Eclipse|CDDL|CC-BY-SA|Proprietary|Commercial|SSPL|BUSL|Business",
    re.I,
)
SKIP_PATH = re.compile(
    r"(^|/)(_?vendor(ed)?|_vendored_packages|third_party|extern(al)?s?|site-packages|typeshed"
    r"|pydoc_data|locale|lib2to3/tests/data|\.data)(/|$)|_pb2(_grpc)?\.py$|\.dist-info/"
)
SKIP_TEXT = re.compile(
    r"GNU (Lesser |Library |Affero )?General Public|do not edit|\bGPLv?[23]", re.I
)


@dataclass(frozen=True)
class Package:
    """One line of `packages.txt`."""

    name: str
    version: str
    licence: str
    role: str

    @classmethod
    def parse(cls, line: str) -> Package:
        """Read `name==version | licence | role`."""
        pin, licence, role = (part.strip() for part in line.split("|"))
        name, version = pin.split("==")
        return cls(name, version, licence, role)


def read_packages(path: Path = HERE / "packages.txt") -> list[Package]:
    """Return every pinned package."""
    lines = path.read_text().splitlines()
    return [Package.parse(line) for line in lines if line.strip() and not line.startswith("#")]


def licence_of(wheel: Path) -> tuple[str, str, str] | None:
    """Return (name, version, licence) for a permissive licence, else None."""
    with zipfile.ZipFile(wheel) as archive:
        found = [n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
        if not found:
            return None
        meta = HeaderParser().parsestr(archive.read(found[0]).decode("utf-8", "replace"))
    classifiers = [
        c.split("::")[-1].strip()
        for c in meta.get_all("Classifier", [])
        if c.startswith("License ::") and not c.endswith("OSI Approved")
    ]
    first_line = (meta.get("License") or "").strip().splitlines()[:1]
    for statement in (
        meta.get("License-Expression") or "",
        "; ".join(classifiers),
        first_line[0][:80] if first_line else "",
    ):
        if statement:
            good = bool(ALLOWED.search(statement)) and not REFUSED.search(statement)
            return (meta["Name"], meta["Version"], statement) if good else None
    return None


def download(packages: Iterable[Package], into: Path) -> None:
    """Download the pinned wheels that are missing."""
    into.mkdir(parents=True, exist_ok=True)
    for package in packages:
        if package.name != "cpython-stdlib" and not find_wheel(package, into):
            pin = f"{package.name}=={package.version}"
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
            command += ["--only-binary=:all:", "--python-version", "3.12"]
            for tag in ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "any"):
                command += ["--platform", tag]
            subprocess.run([*command, "-d", str(into), pin], check=True)


def find_wheel(package: Package, folder: Path) -> Path | None:
    """Return the downloaded wheel of a package."""
    stem = re.sub(r"[-_.]+", "_", package.name).lower()
    for wheel in folder.glob("*.whl"):
        name, version = wheel.name.split("-")[:2]
        if re.sub(r"[-_.]+", "_", name).lower() == stem and version == package.version:
            return wheel
    return None


def files_of(package: Package, wheels: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of the readable files of a package."""
    if package.name == "cpython-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        for path in sorted(root.rglob("*.py")):
            yield str(path.relative_to(root)), path.read_bytes()
        return
    wheel = find_wheel(package, wheels)
    if wheel is None:
        raise FileNotFoundError(f"no wheel of {package.name}=={package.version} in {wheels}")
    with zipfile.ZipFile(wheel) as archive:
        for info in sorted(archive.infolist(), key=lambda i: i.filename):
            if info.filename.endswith((".py", ".md", ".rst")) and info.file_size <= MAX_FILE:
                yield info.filename, archive.read(info)


def clean(path: str, raw: bytes) -> str | None:
    """Return the text of a file, or None.

    Generated files, data tables and files without a permissive licence are left out.
    """
    if SKIP_PATH.search(path) or not MIN_FILE <= len(raw) <= MAX_FILE:
        return None
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    if SKIP_TEXT.search(text[:3000]) or max(map(len, text.splitlines()), default=0) > MAX_LINE:
        return None
    digits = sum(map(str.isdigit, text[:20_000]))
    return None if digits > 0.2 * min(len(text), 20_000) else text


class Deduplicator:
    """Rejects files most of whose longer lines were seen before."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def admit(self, text: str, limit: float = 0.6) -> bool:
        """Return True for a file that is new enough, and count its lines as seen."""
        lines = {hash(line) for raw in text.splitlines() if len(line := raw.strip()) >= 24}
        if lines and len(lines & self._seen) > limit * len(lines):
            return False
        self._seen |= lines
        return True


def chat_examples(text: str, most: int = 3) -> Iterator[str]:
    """Turn "docstring" into a request and the function's source into the answer."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if most == 0:
            return
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        doc = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
        length = node.end_lineno - node.lineno
        if not 20 <= len(doc) <= 400 or not 4 <= length <= 60:
            continue
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        most -= 1
        request = f"Write a Python function `{node.name}`. {doc}"
        yield f"{USER}\n{request}{END}\n{ASSISTANT}\n{source}{END}\n"


def digest(text: str) -> int:
    """Return a stable number for ordering and sampling."""
    return int.from_bytes(hashlib.sha1(text.encode()).digest()[:6], "big")


def build(packages: list[Package], wheels: Path, out: Path) -> dict[str, int]:
    """Write `train.jsonl`, `chat.jsonl` and `heldout.jsonl`; return their sizes in characters."""
    dedup = Deduplicator()
    rows: dict[str, list[tuple[int, str, str]]] = {"train": [], "chat": [], "heldout": []}
    for package in sorted(packages, key=lambda p: (p.role != "heldout", p.name)):
        kept = 0
        files = sorted(files_of(package, wheels), key=lambda f: digest(f[0]))
        for path, raw in files:
            text = clean(path, raw)
            if text is None or kept > PER_PACKAGE_BYTES or not dedup.admit(text):
                continue
            kept += len(text)
            source = f"{package.name}=={package.version}/{path}"
            rows[package.role].append((digest(source), source, text))
            if package.role == "train" and digest(source) % 6 == 0 and path.endswith(".py"):
                chats = enumerate(chat_examples(text))
                rows["chat"] += [(digest(f"{source}{i}"), source, c) for i, c in chats]
        print(f"{package.role:8} {package.name:28} {kept / 1e6:7.2f} MB", flush=True)
    sizes = dict.fromkeys(rows, 0)
    for role, entries in rows.items():
        with (out / f"{role}.jsonl").open("w", encoding="utf-8") as sink:
            for _, source, text in sorted(entries):
                if sizes[role] < TOTAL_CHARACTERS:
                    sink.write(json.dumps({"source": source, "text": text}) + "\n")
                    sizes[role] += len(text)
    licences = {package.name: package.licence for package in packages}
    (out / "licences.json").write_text(json.dumps(licences))
    return sizes


def main() -> None:
    """Build the corpus from `packages.txt`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    packages = read_packages()
    download(packages, args.wheels)
    for package in packages:
        wheel = find_wheel(package, args.wheels)
        if wheel is not None and licence_of(wheel) is None:
            raise SystemExit(f"{package.name}: no permissive licence in its metadata")
    args.out.mkdir(parents=True, exist_ok=True)
    print(build(packages, args.wheels, args.out))


if __name__ == "__main__":
    main()
