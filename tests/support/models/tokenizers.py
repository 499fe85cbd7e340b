"""Tiny real tokenizers, trained or built in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "The quick brown fox jumps over the lazy dog; naïve café, 日本語のテキスト, Привет 🎉🎉",
    "user assistant system hello world STOP stop ###",
] * 4

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_bpe(vocab_size: int = 512) -> Tokenizer:
    """GPT-2's kind: any bytes, special <s> (0) and </s> (1), an ordinary added token with a space.

    Encoding puts <s> in front.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("é日")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def sentencepiece_bpe() -> Tokenizer:
    """Llama 2's kind: metaspace, byte fallback, a stripped leading space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "a", "b", "c", "▁a", "ab", "▁ab", "日", "é", "."]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "▁"), ("▁", "a"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's kind: spaces between words come from the decoder."""
    words = ["[UNK]", "[CLS]", "the", "quick", "##er", "##s", ".", ",", "'", "don", "t", "日"]
    tokenizer = Tokenizer(
        models.WordPiece(vocab={word: n for n, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    """Writes a model folder's tokenizer files: the tokenizer, a chat template, EOS 1."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "chat_template": CHAT_TEMPLATE,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    return folder
