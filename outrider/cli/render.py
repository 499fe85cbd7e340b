"""Tokens in colours by where they came from, and aux_info as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from outrider.v1 import common_pb2, generation_pb2

STYLES: dict[int, tuple[str, Style, str]] = {
    common_pb2.TOKEN_KIND_ACCEPTED: (
        "accepted",
        Style(color="green"),
        "drafted, and what the target would have said",
    ),
    common_pb2.TOKEN_KIND_BONUS: (
        "bonus",
        Style(color="cyan", bold=True),
        "the target's own, after a fully accepted draft",
    ),
    common_pb2.TOKEN_KIND_RECOVERED: (
        "recovered",
        Style(color="yellow", bold=True),
        "the target's own, where a draft was wrong",
    ),
    common_pb2.TOKEN_KIND_PLAIN: ("plain", Style(), "decoded without a draft"),
}
"""Kind -> its name, its style and what it means."""


def write_tokens(console: Console, tokens: Iterable[generation_pb2.OutputToken]) -> None:
    """Write tokens as they are, each in its kind's style: no wrapping, no escape sequences."""
    colors = None if console.color_system is None else COLOR_SYSTEMS[console.color_system]
    for token in tokens:
        _, style, _ = STYLES.get(token.kind, STYLES[common_pb2.TOKEN_KIND_PLAIN])
        # A model may emit anything, but must not drive the reader's terminal.
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in token.text)
        if console.is_terminal:
            text = style.render(text, color_system=colors)
        console.file.write(text)
    console.file.flush()


def legend(counts: Counter[int] | None = None) -> Text:
    """Explain the colours, with the number of tokens of each kind if given."""
    lines = Text()
    for kind, (name, style, meaning) in STYLES.items():
        if lines:
            lines.append("\n")
        count = "" if counts is None else f"{counts[kind]:5d}"
        lines.append(f"  {name:<9}", style).append(f"{count}  {meaning}", Style(dim=True))
    return lines


def aux_table(columns: dict[str, common_pb2.AuxInfo]) -> Table:
    """aux_info of one or more requests side by side; fields that are empty everywhere left out."""
    table = Table("aux_info", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for field in common_pb2.AuxInfo.DESCRIPTOR.fields:
        cells = [_cell(getattr(aux, field.name)) for aux in columns.values()]
        if any(cell not in ("", "0") for cell in cells):
            table.add_row(field.name, *cells)
    return table


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    if isinstance(value, str | int):
        return str(value)
    assert isinstance(value, Iterable), "a repeated field"
    return " ".join(
        f"{each.method} {each.accepted} of {each.drafted}"
        if isinstance(each, common_pb2.MethodCounts)
        else str(each)
        for each in value
    )
