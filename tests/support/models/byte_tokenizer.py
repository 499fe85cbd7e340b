"""A tokenizer of single bytes and a few longer pieces, for models of a small vocabulary."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = 0
_PIECES = ('{"', '":', '",', '"}', "true", "null", "ab", "12")


def byte_tokenizer() -> Tokenizer:
    """</s> is 0; then the bytes in the order of GPT-2's alphabet, then pieces of JSON."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(("</s>", *alphabet))}
    merges: list[tuple[str, str]] = []
    for piece in _PIECES:
        left = piece[0]
        for char in piece[1:]:
            if left + char not in vocab:
                merges.append((left, char))
                vocab[left + char] = len(vocab)
            left += char
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer
