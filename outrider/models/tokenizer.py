"""Text to token ids and back, from a model folder's tokenizer.json.

`transformers.AutoTokenizer` would bring torch into the gateway and slow its start. So this uses the
`tokenizers` library itself, and renders chat templates as transformers does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer as BackendTokenizer

from outrider.errors import ConfigError, InvalidRequestError
from outrider.models.chat_template import ChatTemplate, Conversation, special_tokens
from outrider.models.detokenizer import (
    BYTE_TOKEN,
    ByteLevelDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    byte_level_bytes,
)
from outrider.models.files import parse_json, read_json, read_text

_ALONE: Final = "☺"


class Tokenizer:
    """A model's tokenizer. Safe to share between threads.

    `vocab_size` counts added tokens; the model's own vocabulary may be padded beyond it. A model
    of `needed_vocab_size` tokens knows all but special ones.
    `max_token_chars` is the most (normalised) text that a token can stand for.
    """

    def __init__(
        self,
        backend: BackendTokenizer,
        *,
        chat_template: ChatTemplate | None,
        content_hash: str,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self.facts = facts or {}  # its class, and its special tokens by their names in transformers
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.max_token_chars = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        self.hash = content_hash
        self._special = {
            token_id: token.content
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        ordinary = backend.get_vocab(with_added_tokens=True).values() - self._special.keys()
        self.needed_vocab_size = 1 + max(ordinary, default=-1)
        self._pieces: dict[int, str | bytes] = {}  # of all completions' detokenizers
        decoder = json.loads(backend.to_str())["decoder"]
        self._byte_level = decoder is not None and decoder["type"] == "ByteLevel"  # the whole of it

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a folder in Hugging Face layout. Raises `ConfigError` naming what is missing."""
        content = _read_tokenizer_json(folder)
        try:
            backend = BackendTokenizer.from_str(content)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{folder / 'tokenizer.json'} cannot be loaded: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = read_json(folder / "tokenizer_config.json")
        names = read_json(folder / "special_tokens_map.json")
        return cls(
            backend,
            chat_template=ChatTemplate.load(folder, config, names),
            content_hash=_canonical_hash(content),
            facts={
                "tokenizer_class": str(config.get("tokenizer_class", "PreTrainedTokenizerFast")),
                **special_tokens(config, names),
            },
        )

    def encode(
        self, text: str, *, param: str = "prompt", add_special_tokens: bool = True
    ) -> list[int]:
        """Return the ids of `text`, with or without the post-processor's special tokens (BOS).

        Raises `InvalidRequestError` naming `param` for text that is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:  # lone surrogates: "\ud800" is legal JSON
            raise InvalidRequestError(f"{param} is not valid Unicode text.", param=param) from error
        # The fast variant leaves out character offsets. It releases the GIL.
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    def encode_continuing(self, text: str, *, param: str = "prompt") -> list[int]:
        """Return the ids of `text` within a text: no BOS, and no space that begins a text.

        Raises `InvalidRequestError` naming `param` for text that is not valid Unicode.
        """
        if self._byte_level:
            return self.encode(text, param=param, add_special_tokens=False)
        # As Llama's and Mistral's own code does: behind a character that merges with nothing.
        begin = self.encode(_ALONE, add_special_tokens=False)
        ids = self.encode(_ALONE + text, param=param, add_special_tokens=False)
        if ids[: len(begin)] == begin:
            return ids[len(begin) :]
        return self.encode(text, param=param, add_special_tokens=False)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def chat_template_source(self) -> str:
        """Return the template that renders conversations with tools; empty if there is none."""
        return "" if self._chat_template is None else self._chat_template.tool_source

    def encode_chat(self, conversation: Conversation) -> tuple[list[int], str]:
        """Return a conversation's token ids, ready for the assistant's answer, and its text.

        Raises `InvalidRequestError` when the model has no template or the template refuses.
        """
        if self._chat_template is None:
            raise InvalidRequestError(
                "This model has no chat template. Use a plain completion instead.",
                param="messages",
                reason="NO_CHAT_TEMPLATE",
            )
        text = self._chat_template.render(conversation)  # the template writes BOS itself
        return self.encode(text, add_special_tokens=False, param="messages"), text

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Decode `token_ids`; broken UTF-8 becomes U+FFFD."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def spell(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it; "" for an id without a token."""
        return self._backend.id_to_token(token_id) or ""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it; None if there is none."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token within a text; a special token is spelled as written.

        They are empty for an id without a token, since a model's vocabulary may be padded.
        """
        token: str | None = self._backend.id_to_token(token_id)
        if token is None or token_id in self._special:
            return (token or "").encode()
        if self._byte_level:
            return byte_level_bytes(token)
        if BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        once = self.decode([token_id])  # which may lack the space that it has after another
        return self.decode([token_id, token_id])[len(once) :].encode()

    def spell_special(self, token_id: int) -> str:
        """Return a special token as it is written; "" for any other token."""
        return self._special.get(token_id, "")

    def special_ids(self, names: Sequence[str]) -> dict[int, str]:
        """Return those of `names` that are special tokens, by their ids."""
        wanted = frozenset(names)
        return {token_id: name for token_id, name in self._special.items() if name in wanted}

    def names_special(self, text: str) -> bool:
        """Return whether `text` holds a special token as it is written."""
        return any(token in text for token in self._special.values())

    def detokenizer(self) -> Detokenizer:
        """Create an incremental decoder for one completion."""
        if self._byte_level:
            return ByteLevelDetokenizer(self._token, self.decode, self._pieces)
        return WindowDetokenizer(self._token, self.decode)

    def _token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it; None if it is special or unknown."""
        if token_id in self._special:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token


def tokenizer_hash(folder: Path) -> str:
    """Return the hex SHA-256 of a tokenizer.json, whatever its formatting and padding.

    Services whose hashes are equal number tokens alike. Raises `ConfigError`.
    """
    return _canonical_hash(_read_tokenizer_json(folder))


def hash_if_any(folder: Path) -> str:
    """Hash the folder's tokenizer; empty if the folder holds no tokenizer.json."""
    return tokenizer_hash(folder) if (folder / "tokenizer.json").is_file() else ""


def _canonical_hash(content: str) -> str:
    fields = json.loads(content)
    for runtime_setting in ("padding", "truncation"):
        fields.pop(runtime_setting, None)
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _read_tokenizer_json(folder: Path) -> str:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist. The model folder must hold a fast tokenizer (tokenizer.json); "
            "convert an older one with transformers' AutoTokenizer.save_pretrained."
        )
    content = read_text(path)
    try:
        fields = parse_json(content)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(
            f"{path} is no tokenizer: it must hold a JSON object, as transformers' "
            "AutoTokenizer.save_pretrained writes it."
        )
    return content
