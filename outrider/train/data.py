"""Training text as token windows. The order of windows depends on seed and step alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.train.files import written_whole

Tokens = np.ndarray[Any, Any]
"""Token ids: a stream `[n]`, or rows `[rows, n]`."""
HELD_OUT_SHARE = 50
"""One in so many tokens is held out if no held-out file is given."""


def read_tokens(path: Path, tokenizer: Any) -> Tokens:
    """Return the tokens of a file.

    `.bin` is a stream of uint16, `.npy` holds integers in one or two dimensions, `.jsonl` holds
    objects with `text` or `messages`, and any other file is one text. Documents end with the
    end-of-text token. Raises `ConfigError` for a file that cannot be read as such.
    """
    try:
        if path.suffix == ".bin":
            return np.fromfile(path, np.uint16)
        if path.suffix == ".npy":
            array = np.load(path)
            if array.dtype.kind not in "ui" or array.ndim not in (1, 2):
                raise ConfigError(f"--data {path}: expected integers in one or two dimensions")
            return np.asarray(array)
        documents = list(_documents(path, tokenizer))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"--data {path} cannot be read: {error}") from error
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    # Not verbose: it warns of texts longer than the context, which are cut into windows here.
    encoded = (
        tokenizer.encode(text, add_special_tokens=False, verbose=False) for text in documents
    )
    return np.fromiter((token for ids in encoded for token in (*ids, *end)), np.int32)


def write_rows(path: Path, rows: Tokens) -> None:
    """Write a file that `read_tokens` takes."""
    # Given a name, numpy would add an ending.
    with written_whole(path) as part, part.open("wb") as file:
        np.save(file, rows)


def _documents(path: Path, tokenizer: Any) -> Iterator[str]:
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8")
        return
    # Not `splitlines`: JSON strings may hold other line ends of Unicode.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield _document(json.loads(line), tokenizer)
        except Exception as error:  # a chat template is a program: it may raise anything
            raise ConfigError(f"--data {path}, line {number}: {error}") from error


def _document(row: Any, tokenizer: Any) -> str:
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return str(row["text"])
    if not isinstance(row, dict) or "messages" not in row:
        raise ValueError("neither `text` nor `messages`")
    messages = row["messages"]
    if not (isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)):
        raise ValueError("`messages` is no list of objects, such as one with role and content")
    return str(tokenizer.apply_chat_template([*map(_joined, messages)], tokenize=False))


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its parts as one text, as the gateway has it: few templates join."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("`content` has a part that is no text")
    return {**message, "content": "".join(map(str, texts))}


class Source:
    """Windows of `length` + 1 tokens, of a stream (each epoch is cut elsewhere) or of rows."""

    def __init__(self, tokens: Tokens, length: int, seed: int) -> None:
        self.is_stream = tokens.ndim == 1
        width = length + 1 if self.is_stream else min(length + 1, tokens.shape[1])
        if width < 8:
            raise ConfigError(
                f"--data: windows of {width} tokens are too short, they need 8: raise --length and "
                "--prompt-length, or give longer rows."
            )
        if len(tokens) < (2 * width if self.is_stream else 1):
            raise ConfigError(
                f"--data or --heldout: {tokens.size} tokens are too few for windows of {length}: "
                "give more text, or lower --length and --prompt-length."
            )
        if not self.is_stream:
            per_row = tokens.shape[1] // width
            tokens = tokens[:, : per_row * width].reshape(-1)
        self.tokens = torch.from_numpy(tokens.astype(np.int32))
        self.width, self.seed = width, seed
        self.count = len(tokens) // width - self.is_stream  # a stream's cut moves by up to a window
        self._orders: dict[int, tuple[int, Tensor]] = {}  # of the latest epochs

    def rows(self, first: int, count: int) -> Tensor:
        """Return windows from `first` on in the endless order, `[count, width]` int64."""
        starts = [self._start(index) for index in range(first, first + count)]
        index = torch.tensor(starts)[:, None] + torch.arange(self.width)
        return self.tokens[index].long()

    def _start(self, index: int) -> int:
        epoch, place = divmod(index, self.count)
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
            shift = int(torch.randint(self.width, (1,), generator=generator)) * self.is_stream
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = shift, torch.randperm(self.count, generator=generator)
        shift, order = self._orders[epoch]
        return shift + int(order[place]) * self.width


class Windows:
    """Several sources, each with an equal share of the steps."""

    def __init__(self, sources: Sequence[Source], tokens_per_step: int) -> None:
        self.sources, self.tokens_per_step = sources, tokens_per_step

    def batch(self, step: int, rank: int, world_size: int) -> Tensor:
        """Return one process's part of a step: `[rows, length + 1]`."""
        source = self.sources[step % len(self.sources)]
        rows = max(1, self.tokens_per_step // (source.width - 1))
        turn = step // len(self.sources)
        return source.rows((turn * world_size + rank) * rows, rows)


def hold_out(tokens: Tokens, length: int) -> tuple[Tokens, Tokens]:
    """Split off the end, which is held out: at least two windows of `length` + 1."""
    share = max(len(tokens) // HELD_OUT_SHARE, 2 * (length + 1) if tokens.ndim == 1 else 1)
    return tokens[:-share], tokens[-share:]


def draft_vocabulary(streams: Sequence[Tokens], vocab_size: int, size: int) -> Tensor:
    """Return the `size` most frequent tokens, ascending; `[size]` int64."""
    counts = np.zeros(vocab_size, np.int64)
    for stream in streams:
        counts += np.bincount(stream.reshape(-1), minlength=vocab_size)[:vocab_size]
    most = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(most))
