"""Train the byte-level BPE tokenizer, encode the corpus, and cut held-out prompts."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.config import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    END_OF_TEXT_ID,
    PAD,
    SPECIAL_TOKENS,
    TARGET,
)

# Words with one leading mark; numbers; punctuation; a line break with the indentation after it.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+[ \t]*|\s+(?!\S)|\s+"
PROMPT_TOKENS = 256


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (source, text) of every document."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield row["source"], row["text"]


def train(corpus: Path, characters: int) -> Tokenizer:
    """Train a byte-level BPE of 8192 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TARGET.vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
        show_progress=False,
    )

    def sample() -> Iterator[str]:
        left = characters
        for _, text in texts(corpus):
            yield text
            left -= len(text)
            if left < 0:
                return

    tokenizer.train_from_iterator(sample(), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that `AutoTokenizer` reads."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in (END_OF_TEXT, PAD)],
        model_max_length=TARGET.max_positions,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


_tokenizer: Tokenizer


def _start(path: str, as_text: bool) -> None:
    global _tokenizer
    _tokenizer = Tokenizer.from_file(path)
    _tokenizer.encode_special_tokens = as_text


def _encode(batch: list[str]) -> bytes:
    ids: list[int] = []
    for encoding in _tokenizer.encode_batch(batch):
        ids += [*encoding.ids, END_OF_TEXT_ID]
    return np.array(ids, dtype=np.uint16).tobytes()


def encode(tokenizer: Path, corpus: Path, out: Path, processes: int, as_text: bool = True) -> int:
    """Write the documents as uint16 tokens, each followed by the end-of-text token.

    Special tokens spelt out in source code stay text, unless `as_text` is false (chat data).
    """
    documents = [text for _, text in texts(corpus)]
    batches = [documents[i : i + 128] for i in range(0, len(documents), 128)]
    context = multiprocessing.get_context("fork")
    count = 0
    start = (str(tokenizer), as_text)
    with context.Pool(processes, _start, start) as pool, out.open("wb") as sink:
        for block in pool.imap(_encode, batches):
            count += len(block) // 2
            sink.write(block)
    return count


def mix(documents: Path, chat: Path, out: Path) -> None:
    """Write one stream of documents with the chat examples spread among them."""
    plain, talk = (np.fromfile(path, np.uint16) for path in (documents, chat))
    parts = max(1, min(len(talk) // 4096, 2000))
    pairs = zip(np.array_split(plain, parts), np.array_split(talk, parts), strict=True)
    np.concatenate([piece for pair in pairs for piece in pair]).tofile(out)


def cut_prompts(tokenizer: Tokenizer, corpus: Path, most: int) -> tuple[np.ndarray, list[dict]]:  # type: ignore[type-arg]
    """Return prompts that end at a line break inside a held-out file, some also as text."""
    rng = random.Random(0)
    rows, shown = [], []
    for source, text in texts(corpus):
        if not source.endswith(".py") or len(text) < 4000 or "/test" in source:
            continue
        lines = text.splitlines(keepends=True)
        body = [i for i, line in enumerate(lines) if line.startswith("    ") and line.strip()]
        body = [i for i in body if len("".join(lines[:i])) > 1500 and i + 12 < len(lines)]
        if not body:
            continue
        at = rng.choice(body)
        ids = tokenizer.encode("".join(lines[:at]).rstrip("\n")).ids
        if len(ids) < PROMPT_TOKENS:
            continue
        rows.append(ids[-PROMPT_TOKENS:])
        first = at
        while first > 0 and len(tokenizer.encode("".join(lines[first - 1 : at])).ids) < 280:
            first -= 1
        prompt = "".join(lines[first:at]).rstrip("\n")
        reference = "\n" * (len("".join(lines[first:at])) - len(prompt))
        reference += "".join(lines[at : at + 20])
        shown.append({"prompt": prompt, "reference": reference, "source": source})
        if len(rows) == most:
            break
    return np.array(rows, dtype=np.int64), shown


def main() -> None:
    """Train, encode and cut prompts, as the flags ask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder to write or read")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--characters", type=int, default=24_000_000)
    parser.add_argument("--encode", type=Path, help="folder for the token streams")
    parser.add_argument("--prompts", type=Path, help="file for the shown held-out prompts")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if args.train:
        args.tokenizer.mkdir(parents=True, exist_ok=True)
        save(train(args.corpus / "train.jsonl", args.characters), args.tokenizer)
    file = args.tokenizer / "tokenizer.json"
    rows, shown = cut_prompts(Tokenizer.from_file(str(file)), args.corpus / "heldout.jsonl", 320)
    if args.prompts:
        licences = json.loads((args.corpus / "licences.json").read_text())
        step = max(1, len(shown) // 48)
        with args.prompts.open("w", encoding="utf-8") as sink:
            for row in shown[::step][:48]:
                licence = licences[row["source"].split("==")[0]]
                sink.write(json.dumps({**row, "licence": licence}) + "\n")
    if args.encode:
        args.encode.mkdir(parents=True, exist_ok=True)
        np.save(args.encode / "prompts.npy", rows)
        report = {"prompts": len(rows)}
        for part in ("train", "chat", "heldout"):
            source, out = args.corpus / f"{part}.jsonl", args.encode / f"{part}.bin"
            report[part] = encode(file, source, out, args.processes, as_text=part != "chat")
        mix(*(args.encode / f"{part}.bin" for part in ("train", "chat", "mixed")))
        report["heldout_bytes"] = sum(
            len(t.encode()) for _, t in texts(args.corpus / "heldout.jsonl")
        )
        (args.encode / "report.json").write_text(json.dumps(report))
        print(report, flush=True)


if __name__ == "__main__":
    main()
