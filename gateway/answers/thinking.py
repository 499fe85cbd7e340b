"""Reasoning between two marks at the begin of an answer."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.answers.reader import END, SPACE, Parse, Reader


@dataclass(frozen=True, slots=True)
class Marks:
    """What begins and ends reasoning. The prompt may hold the first already."""

    open: str = "<think>"
    close: str = "</think>"
    always: bool = False
    """Answers begin with reasoning even where neither prompt nor answer hold the first mark."""

    def is_open(self, prompt: str) -> bool:
        """Tell whether an answer to the prompt begins with reasoning."""
        end = prompt.rstrip()
        return end.endswith(self.open) or (self.always and not end.endswith(self.close))

    def is_closed(self, prompt: str) -> bool:
        """Tell whether the prompt ended the reasoning."""
        return prompt.rstrip().endswith(self.close)


def read_thinking(reader: Reader, marks: Marks, *, is_open: bool) -> Parse[None]:
    """Read reasoning, if there is any; `is_open`: the prompt began it."""
    if (yield from reader.over(SPACE, marks.open)):
        is_open = True
    if is_open and (yield from reader.until([marks.close], reader.reasoning)) != END:
        yield from reader.skip("\n")
