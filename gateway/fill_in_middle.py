"""Prompts that ask for the text between two others, with the tokens that models have for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from outrider.errors import InvalidRequestError
from outrider.models.tokenizer import Tokenizer

_Part = Literal["prefix", "suffix"]


@dataclass(frozen=True, slots=True)
class _Style:
    """The tokens before the two texts, in the prompt's order, and the last one, if any."""

    parts: tuple[tuple[str, _Part], ...]
    last: str = ""
    ends: tuple[str, ...] = ()
    """Tokens that end the middle besides the end of sequence."""

    def known(self, tokenizer: Tokenizer) -> bool:
        """Tell whether a tokenizer has these tokens."""
        names = (*(name for name, _ in self.parts), self.last)
        return all(tokenizer.token_id(name) is not None for name in names if name)


def _in_order(prefix: str, suffix: str, middle: str, *ends: str) -> _Style:
    return _Style(((prefix, "prefix"), (suffix, "suffix")), middle, ends)


_STYLES: Final = (
    _in_order(  # Qwen2.5-Coder, CodeGemma, Granite
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        *("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>"),
    ),
    _in_order(  # StarCoder
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        *("<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>"),
    ),
    _in_order("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder, -V2, V3
    _in_order("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),  # CodeLlama
    _Style((("[SUFFIX]", "suffix"), ("[PREFIX]", "prefix"))),  # Codestral
)


def encode_infill(
    tokenizer: Tokenizer, prefix: str, suffix: str, param: str
) -> tuple[list[int], frozenset[int]]:
    """Return a prompt's token ids, and those that end its answer besides the end of sequence.

    `param` is the client's name of the prefix. Raises `InvalidRequestError`.
    """
    style = next((style for style in _STYLES if style.known(tokenizer)), None)
    if style is None:
        raise InvalidRequestError(
            "suffix is not supported by this model: its tokenizer has no tokens to fill in the "
            "middle.",
            param="suffix",
        )
    texts = {
        "prefix": tokenizer.encode(prefix, param=param, add_special_tokens=False),
        "suffix": tokenizer.encode_continuing(suffix, param="suffix"),
    }
    ids = tokenizer.encode("")  # BOS, where the model has one
    for name, part in style.parts:
        ids += [*_ids(tokenizer, name), *texts[part]]
    return [*ids, *_ids(tokenizer, style.last)], frozenset(_ids(tokenizer, *style.ends))


def _ids(tokenizer: Tokenizer, *names: str) -> list[int]:
    """Return the ids of those that the tokenizer has."""
    found = map(tokenizer.token_id, names)
    return [token_id for token_id in found if token_id is not None]
