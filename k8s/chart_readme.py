"""Print the chart's README: every value of values.yaml with its default and its comment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

CHART = Path(__file__).parent / "chart/outrider"
_LINE = re.compile(r"( *)(\w+):(?: (?!#)(.*?))?(?: +# (.*))?$")
_HEAD = """\
# Outrider's chart

Speculative decoding for large language models as a distributed service.
[docs/kubernetes.md](../../../docs/kubernetes.md) says how to install it. `k8s/render.sh` makes this
table of [values.yaml](values.yaml).

| value | default | |
|---|---|---|
"""


def readme() -> str:
    """Return the text."""
    rows = (f"| `{name}` | {default} | {about} |" for name, default, about in values())
    return _HEAD + "\n".join(rows) + "\n"


def values() -> Iterator[tuple[str, str, str]]:
    """Yield path, default and comment of each value; of a map only what has a comment itself."""
    path: list[str] = []
    above: list[str] = []
    # The comment at the top is the file's.
    text = (CHART / "values.yaml").read_text().partition("\n\n")[2]
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            above.append(line.lstrip(" #"))
            continue
        if found := _LINE.fullmatch(line):
            indent, name, default, trailing = found.groups()
            path = [*path[: len(indent) // 2], name]
            about = " ".join([*above, *([trailing] if trailing else [])])
            if default is not None or about:
                shown = "" if default is None else f"`{default}`"
                yield ".".join(path), shown, about.replace("|", "\\|")
        above = []


if __name__ == "__main__":
    print(readme(), end="")
