"""The tokenizer: encoding, chat templates, end tokens, identity, and clear errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from outrider.errors import ConfigError, InvalidRequestError
from outrider.models.chat_template import ChatTemplate, Conversation
from outrider.models.tokenizer import Tokenizer, tokenizer_hash
from tests.support.models.tokenizers import byte_level_bpe, save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(byte_level_bpe(), tmp_path / "model")


def _chat_ids(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    return tokenizer.encode_chat(Conversation(messages))[0]


def test_tokenizer_encode_with_post_processor_adds_its_bos(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    token_ids = tokenizer.encode("hello world")
    assert token_ids[0] == 0
    assert tokenizer.decode(token_ids) == "hello world"
    assert tokenizer.encode("") == [0]


def test_chat_template_with_its_own_bos_adds_no_other(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    token_ids = _chat_ids(tokenizer, [{"role": "user", "content": "hello"}])
    assert token_ids.count(0) == 1
    assert tokenizer.decode(token_ids) == "<|user|>hello\n<|assistant|>"


def test_tokenizer_with_any_chat_template_equals_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    messages = [{"role": "system", "content": "é日 <s>"}, {"role": "user", "content": "<b>&\n"}]
    for source in (
        None,
        "{% generation %}{{ messages | tojson }}{% endgeneration %}{{ eos_token }}",
    ):
        if source is not None:
            (folder / "chat_template.jinja").write_text(source)
            reference.chat_template, ours = source, Tokenizer.load(folder)
        expected = reference.apply_chat_template(messages, add_generation_prompt=True)
        expected = getattr(expected, "input_ids", expected)
        assert _chat_ids(ours, messages) == expected
    assert ours.encode("hello é日 world") == reference("hello é日 world").input_ids


TEMPLATES = (
    "{{ messages[0].content | tojson(ensure_ascii=False) }}",
    "{{ messages | tojson(indent=2, sort_keys=True) }}",
    "{{ messages[0] | tojson(separators=(',', ':')) }}",
    "{% set x = namespace(n=1) %}{% for _ in messages %}{% set x.n = 2 %}{% endfor %}{{ x.n }}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{{ dict(a=bos_token) }}{{ strftime_now('%Y') }}",
)


@pytest.mark.parametrize("source", TEMPLATES)
def test_chat_template_with_filters_and_globals_renders_as_transformers(
    folder: Path, source: str
) -> None:
    (folder / "chat_template.jinja").write_text(source)
    reference = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "é日 <b>&"}, {"role": "assistant", "content": "ok"}]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert (
        ChatTemplate(source, reference.special_tokens_map).render(Conversation(messages))
        == expected
    )
    assert _chat_ids(Tokenizer.load(folder), messages) == reference.encode(
        expected, add_special_tokens=False
    )


@pytest.mark.parametrize("decoder", [True, False])
@pytest.mark.parametrize("in_map", [{}, {"bos_token": "<s>"}, {"bos_token": {"content": "</s>"}}])
@pytest.mark.parametrize("in_config", [{}, {"bos_token": "</s>"}])
def test_special_tokens_of_two_files_are_those_of_transformers(
    tmp_path: Path, in_config: dict[str, object], in_map: dict[str, object], decoder: bool
) -> None:
    folder = save(byte_level_bpe(), tmp_path, chat_template="[{{ bos_token }}]")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["bos_token"]
    if decoder:
        config["added_tokens_decoder"] = {
            "0": {"content": "<s>", "special": True},
            "1": {"content": "</s>", "special": True},
        }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | in_config))
    (folder / "special_tokens_map.json").write_text(json.dumps(in_map))
    messages = [{"role": "user", "content": "x"}]
    reference = AutoTokenizer.from_pretrained(folder)
    text = reference.apply_chat_template(messages, tokenize=False)
    assert _chat_ids(Tokenizer.load(folder), messages) == reference.encode(
        text, add_special_tokens=False
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ [1].index(9) }}", "ValueError"),
        ("{{ 10.0 ** 1000 }}", "OverflowError"),
        ("{{ messages[0].nothing.more }}", "no attribute"),
    ],
)
def test_chat_template_that_raises_is_an_invalid_request(
    folder: Path, source: str, said: str
) -> None:
    (folder / "chat_template.jinja").write_text(source)
    tokenizer = Tokenizer.load(folder)
    with pytest.raises(InvalidRequestError, match=said) as caught:
        _chat_ids(tokenizer, [{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ x | nosuchfilter }}", "{% if %}"])
def test_chat_template_that_does_not_compile_is_a_config_error(folder: Path, source: str) -> None:
    (folder / "chat_template.jinja").write_text(source)
    with pytest.raises(ConfigError, match="chat template is broken"):
        Tokenizer.load(folder)


def test_chat_template_that_refuses_messages_names_them(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        _chat_ids(Tokenizer.load(folder), [{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_chat_template_that_leaves_the_sandbox_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequestError, match="unsafe"):
        _chat_ids(Tokenizer.load(folder), [{"role": "user", "content": "x"}])


def test_tokenizer_without_template_is_an_invalid_request(tmp_path: Path) -> None:
    folder = save(byte_level_bpe(), tmp_path, chat_template=None)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        _chat_ids(Tokenizer.load(folder), [{"role": "user", "content": "x"}])


def test_tokenizer_encode_of_lone_surrogates_is_an_invalid_request(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode") as caught:
        Tokenizer.load(folder).encode("\ud800")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("content", [None, "{", '{"model": {}}', "[]", "null"])
def test_tokenizer_load_of_missing_or_broken_files_is_refused(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["[]", '"text"', "null", "1"])
def test_tokenizer_hash_of_no_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no tokenizer"):
        tokenizer_hash(tmp_path)


def test_tokenizer_hash_of_reformatted_file_is_the_same(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe()
    first = save(tokenizer, tmp_path / "a")
    tokenizer.enable_truncation(16)
    second = save(tokenizer, tmp_path / "b")
    fields = json.loads((second / "tokenizer.json").read_text())
    (second / "tokenizer.json").write_text(json.dumps(fields, indent=4))
    third = save(byte_level_bpe(vocab_size=400), tmp_path / "c")
    assert tokenizer_hash(first) == tokenizer_hash(second) == Tokenizer.load(second).hash
    assert tokenizer_hash(first) != tokenizer_hash(third)
    assert len(tokenizer_hash(first)) == 64
    assert len(Tokenizer.load(second).encode("hello world " * 50)) > 16


def test_tokenizer_when_imported_imports_no_torch() -> None:
    code = "import sys, outrider.models.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def tool_turns(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "y", "tool_call_id": "1"},
    ]


def test_tools_and_calls_render_as_transformers(tmp_path: Path) -> None:
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}"
        "{{ m.reasoning_content or '' }}{% if m.content is defined %}{{ m.content }}"
        "{% endif %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
        "{% endfor %}{% endfor %}{{ enable_thinking }}"
    )
    folder = save(byte_level_bpe(), tmp_path, chat_template=template)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    turns = tool_turns({"a": "é"})
    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(
        turns, tools=tools, add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    given = Conversation(turns, tools, {"enable_thinking": False})
    ids, text = Tokenizer.load(folder).encode_chat(given)
    assert text == expected
    assert ids == reference.encode(expected, add_special_tokens=False)


def test_template_that_joins_arguments_to_text_gets_them_as_text() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ 'a' + c['function']['arguments'] }}{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    assert template.render(Conversation(tool_turns({"q": "é"}))) == 'a{"q": "é"}'


def test_template_that_asks_for_null_content_gets_it() -> None:
    source = (
        "{% for m in messages %}{{ m.content if m['content'] is not none else '-' }}{% endfor %}"
    )
    assert ChatTemplate(source, {}).render(Conversation(tool_turns({}))) == "x-y"


def test_template_for_tools_is_used_where_there_are_tools(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    folder = save(byte_level_bpe(), tmp_path, chat_template=templates)
    tokenizer = Tokenizer.load(folder)
    turns = [{"role": "user", "content": "x"}]
    assert tokenizer.encode_chat(Conversation(turns))[1] == "d"
    assert tokenizer.encode_chat(Conversation(turns, [{"type": "function"}]))[1] == "t"
    assert tokenizer.chat_template_source == "t"
