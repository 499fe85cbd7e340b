"""The formats that models write calls and reasoning in, and which of them a template means."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from gateway.answers import deepseek as ds
from gateway.answers import harmony as gpt_oss
from gateway.answers import mistral as mi
from gateway.answers.deepseek import deepseek
from gateway.answers.harmony import harmony
from gateway.answers.hermes import CLOSE, OPEN, hermes
from gateway.answers.llama import PYTHON_TAG, llama
from gateway.answers.mistral import mistral
from gateway.answers.pythonic import PYTHON_END, PYTHON_START, pythonic
from gateway.answers.reader import Parse, Reader
from gateway.answers.tagged import (
    FUNCTION,
    FUNCTION_END,
    KEY,
    KEY_END,
    PARAMETER,
    PARAMETER_END,
    VALUE,
    VALUE_END,
    glm45,
    qwen3_coder,
)
from gateway.answers.thinking import Marks
from gateway.answers.tools import Tools
from outrider.errors import ConfigError

Calls = Callable[[Reader, Tools], Parse[None]]


@dataclass(frozen=True, slots=True)
class CallText:
    """The spelling of a call with JSON arguments; `{name}` stands for the function's name."""

    begin: str
    end: str
    between: str = ""  # two calls
    before: str = ""  # the first call
    after: str = ""  # the last one
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class TaggedText(CallText):
    """The spelling of a call with texts as arguments; `{key}` stands for an argument's name."""

    argument: str = ""
    value_end: str = ""
    argument_end: str = ""  # behind it


@dataclass(frozen=True, slots=True)
class KeywordText(CallText):
    """The spelling of a call in Python, with keyword arguments."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls."""

    calls: Calls
    text: CallText
    mark: str
    """The text that begins the first call; empty: calls are the whole answer."""
    others: tuple[str, ...] = ()
    """More parts of the format that may be special tokens."""
    id_chars: int | None = None
    """Characters of a call's id, where templates want so many."""
    is_answer: bool = False
    """True for the format of whole answers, with reasoning."""


_PYTHONIC: Final = "func_name1(params_name1="
"""The words in which Meta's prompts ask for calls in Python."""
_DEEPSEEK_MARKS: Final = (ds.CALLS_END, ds.CALL, ds.CALL_END, ds.SEPARATOR)
_MISTRAL: Final = (mi.OPEN, (mi.CALL_ID, mi.ARGS), 9)
_HARMONY_MARKS: Final = (
    *(gpt_oss.START, gpt_oss.CONSTRAIN, gpt_oss.MESSAGE),
    *(gpt_oss.MESSAGE_END, gpt_oss.CALL_END, gpt_oss.RETURN),
)
_GLM_MARKS: Final = (CLOSE, KEY, KEY_END, VALUE, VALUE_END)


def _named(key: str) -> str:
    return f'{{"name": "{{name}}", "{key}": '


TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": ToolFormat(
        hermes,
        CallText(f"{OPEN}\n{_named('arguments')}", f"}}\n{CLOSE}", "\n"),
        *(OPEN, (CLOSE,)),
    ),
    "qwen3_coder": ToolFormat(
        qwen3_coder,
        TaggedText(
            f"{OPEN}\n{FUNCTION}{{name}}>\n",
            *(f"{FUNCTION_END}\n{CLOSE}", "\n"),
            argument=f"{PARAMETER}{{key}}>\n",
            value_end=f"\n{PARAMETER_END}\n",
        ),
        *(OPEN, (CLOSE,)),
    ),
    "glm45": ToolFormat(
        glm45,
        TaggedText(
            *(f"{OPEN}{{name}}\n", CLOSE, "\n"),
            argument=f"{KEY}{{key}}{KEY_END}\n{VALUE}",
            value_end=VALUE_END,
            argument_end="\n",
        ),
        *(OPEN, _GLM_MARKS),
    ),
    "llama3_json": ToolFormat(
        llama, CallText(_named("parameters"), "}", "; "), *("", (PYTHON_TAG,))
    ),
    "pythonic": ToolFormat(
        pythonic, KeywordText("{name}(", ")", ", ", "[", "]"), *("", (PYTHON_START, PYTHON_END))
    ),
    "mistral_list": ToolFormat(
        mistral, CallText(_named("arguments"), "}", ", ", f"{mi.OPEN}[", "]"), *_MISTRAL
    ),
    "mistral": ToolFormat(mistral, CallText(f"{mi.OPEN}{{name}}", ""), *_MISTRAL),
    "mistral_args": ToolFormat(mistral, CallText(f"{mi.OPEN}{{name}}{mi.ARGS}", ""), *_MISTRAL),
    "deepseek_v3": ToolFormat(
        deepseek,
        CallText(
            f"{ds.CALL}function{ds.SEPARATOR}{{name}}\n{ds.FENCE}\n",
            f"\n```{ds.CALL_END}",
            *("\n", ds.CALLS, ds.CALLS_END),
        ),
        *(ds.CALLS, _DEEPSEEK_MARKS),
    ),
    "deepseek_v31": ToolFormat(
        deepseek,
        CallText(f"{ds.CALL}{{name}}{ds.SEPARATOR}", ds.CALL_END, "", ds.CALLS, ds.CALLS_END),
        *(ds.CALLS, _DEEPSEEK_MARKS),
    ),
    "openai": ToolFormat(
        harmony,
        CallText(
            f"{gpt_oss.CHANNEL}commentary to=functions.{{name}} {gpt_oss.CONSTRAIN}json"
            f"{gpt_oss.MESSAGE}",
            "",
            parallel=False,
        ),
        *(gpt_oss.CHANNEL, _HARMONY_MARKS),
        is_answer=True,
    ),
}
"""By the names of vLLM's parsers where it has one."""

_THINK: Final = Marks()
REASONING_FORMATS: Final[Mapping[str, Marks | None]] = {
    "think": _THINK,
    "deepseek_r1": Marks(always=True),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "openai": None,
    "none": None,
}
_TOOL_ALIASES: Final = {
    **dict.fromkeys(("qwen", "qwen25"), "hermes"),
    "qwen3_xml": "qwen3_coder",
    **dict.fromkeys(("glm", "glm47"), "glm45"),
    **dict.fromkeys(("llama3", "llama4_json"), "llama3_json"),
    "llama4_pythonic": "pythonic",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "gpt-oss": "openai",
}
_REASONING_ALIASES: Final = {
    **dict.fromkeys(("qwen3", "glm45", "glm47", "deepseek_v3", "deepseek-v3"), "think"),
    **dict.fromkeys(("deepseek-r1", "qwen3-thinking"), "deepseek_r1"),
    **dict.fromkeys(("gpt-oss", "openai_gptoss"), "openai"),
}
"""Names of other servers' parsers."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of a model's answers."""

    tools: ToolFormat | None = None
    marks: Marks | None = None
    template_takes_tools: bool = False

    @property
    def is_harmony(self) -> bool:
        """Tell whether answers are messages in channels."""
        return self.tools is not None and self.tools.is_answer

    def reading(self, prompt: str, tools: Tools) -> Reading | None:
        """Return how to read answers to a prompt; None: as they are."""
        calls = self.tools if tools or self.is_harmony else None
        if calls is None and self.marks is None:
            return None
        names = () if calls is None else (calls.mark, *calls.others)
        marks = self.marks
        return Reading(
            calls=None if calls is None else calls.calls,
            tools=tools,
            marks=marks,
            thinks=marks is not None and marks.is_open(prompt),
            special=names if marks is None else (*names, marks.open, marks.close),
            may_think=marks is not None and not marks.is_closed(prompt),
            id_chars=None if calls is None else calls.id_chars,
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """The way to read the answers to one request."""

    calls: Calls | None
    tools: Tools
    marks: Marks | None
    thinks: bool
    """True if the prompt began the reasoning."""
    may_think: bool
    """True if the answer may begin with reasoning."""
    special: tuple[str, ...] = ()
    """Special tokens that are part of the format."""
    id_chars: int | None = None
    """Characters of a call's id, where templates want so many."""
    one_call: bool = False
    """True if calls behind the first are left out."""
    only_calls: bool = False
    """True if a constraint leaves nothing but calls behind the reasoning."""

    def new_call_id(self) -> str:
        """Return an id for a call."""
        made = uuid.uuid4().hex
        return f"call_{made[:24]}" if self.id_chars is None else made[: self.id_chars]


def answer_format(
    template: str, tool_parser: str = "auto", reasoning_parser: str = "auto"
) -> AnswerFormat:
    """Return the format that a model's template shows, or that its operator names.

    Raises `ConfigError` for an unknown name.
    """
    tool_parser = _known(tool_parser, "tool-call-parser", TOOL_FORMATS, _TOOL_ALIASES)
    reasoning_parser = _known(
        *(reasoning_parser, "reasoning-parser", REASONING_FORMATS, _REASONING_ALIASES)
    )
    shown = tool_format_of(template)
    name = (shown or "hermes") if tool_parser == "auto" else tool_parser
    if reasoning_parser == "openai":
        name = "openai"
    if reasoning_parser == "auto":
        reasoning_parser = _reasoning_format_of(template)
    marks = REASONING_FORMATS[reasoning_parser]
    return AnswerFormat(
        TOOL_FORMATS[name],
        None if name == "openai" else marks,
        tool_parser != "auto" or "tools" in template,
    )


def _known(name: str, flag: str, formats: Mapping[str, object], aliases: Mapping[str, str]) -> str:
    name = aliases.get(name, name)
    if name not in ("auto", *formats):
        known = ", ".join(("auto", *formats, *aliases))
        raise ConfigError(f"--{flag} must be one of {known}, not {name!r}.")
    return name


def tool_format_of(template: str) -> str | None:
    """Return the format of calls that a chat template writes; None if it is unknown."""
    if gpt_oss.CHANNEL in template:
        return "openai"
    if "<arg_key>" in template:
        return "glm45"
    if "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    if OPEN in template:
        return "hermes"
    if ds.CALLS in template:
        return "deepseek_v3" if ds.FENCE in template else "deepseek_v31"
    if mi.OPEN in template:
        if mi.ARGS in template:
            return "mistral_args"
        lists = f"{mi.OPEN} [" in template or f"{mi.OPEN}[" in template
        return "mistral_list" if lists else "mistral"
    if _PYTHONIC in template:
        return "pythonic"
    if PYTHON_TAG in template or ("<|start_header_id|>" in template and "parameters" in template):
        return "llama3_json"
    return None


def _reasoning_format_of(template: str) -> str:
    if "[THINK]" in template:
        return "mistral"
    return "think" if _THINK.close in template else "none"
