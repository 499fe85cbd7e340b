"""Prompts and outputs of editing and agentic work, made without a model.

Edits are made of functions of Python's standard library by their syntax trees, and agentic
conversations of templates and the same functions. Both are fixed by a seed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MODULES = (
    *("argparse", "configparser", "csv", "difflib", "filecmp", "fractions", "gzip", "heapq"),
    *("json.decoder", "mailbox", "netrc", "optparse", "pprint", "sched", "shlex", "shutil"),
    *("tarfile", "textwrap", "trace", "zipfile"),
)
MIN_LINES, MAX_LINES = 25, 120


@dataclass(frozen=True)
class Trace:
    """One request with its kind, prompt, output, and the advice that it could give."""

    kind: str
    prompt: str
    output: str
    advice: str = ""


def functions() -> Iterator[str]:
    """Yield dedented functions of middling length from the standard library."""
    for name in MODULES:
        source = inspect.getsource(importlib.import_module(name))
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef):
                continue
            assert node.end_lineno is not None
            own = lines[node.lineno - 1 : node.end_lineno]
            if MIN_LINES <= len(own) <= MAX_LINES:
                margin = len(own[0]) - len(own[0].lstrip())
                text = "".join(line[min(margin, len(line) - len(line.lstrip())) :] for line in own)
                if _parses(text):
                    yield text


def edits(seed: int = 0, limit: int = 60) -> list[Trace]:
    """Return one edit each of `limit` functions, with the kinds in turn."""
    rng = random.Random(seed)
    texts = list(functions())
    rng.shuffle(texts)
    traces: list[Trace] = []
    kinds = list(EDITS.items())
    for text in texts:
        kind, edit = kinds[len(traces) % len(kinds)]
        edited = edit(text)
        if edited is not None and edited != text and _parses(edited):
            prompt = f"Here is a function:\n\n{text}\nTask: {kind}. The whole function, edited:\n\n"
            traces.append(Trace(kind, prompt, edited, text))
        if len(traces) == limit:
            break
    return traces


def rename(text: str) -> str | None:
    """Rename the local variable or argument that is used most."""
    tree = _function(text)
    used = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    local = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)} - {"self", "cls"}
    local |= {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    chosen = max(sorted(local), key=lambda name: used[name], default=None)
    if chosen is None:
        return None
    places = [
        (node.lineno, node.col_offset)
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id == chosen)
        or (isinstance(node, ast.arg) and node.arg == chosen)
    ]
    if any(isinstance(node, ast.keyword) and node.arg == chosen for node in ast.walk(tree)):
        return None
    lines = text.splitlines(keepends=True)
    if not text.isascii():
        return None  # offsets are in bytes
    for line, column in sorted(set(places), reverse=True):
        old = lines[line - 1]
        lines[line - 1] = f"{old[:column]}current_{chosen}{old[column + len(chosen) :]}"
    return "".join(lines)


_CHECK = "    if verbose:\n        print('called')\n"


def add_argument(text: str) -> str | None:
    """Add a keyword argument, and a check of it."""
    node = _function(text)
    close = text.rfind(")", 0, text.index(":\n"))
    if node.args.kwarg or node.args.kwonlyargs or node.returns or close < 0:
        return None
    given = node.args.args or node.args.vararg
    text = text[:close] + (", " if given else "") + "verbose=False" + text[close:]
    if not _parses(text):
        return None
    lines = text.splitlines(keepends=True)
    lines.insert(_after_docstring(_function(text).body[0]), _CHECK)
    return "".join(lines)


def insert_logging(text: str) -> str | None:
    """Insert a line of logging at the beginning and before each return of its own."""
    node = _function(text)
    lines = text.splitlines(keepends=True)
    places = [
        (child.lineno - 1, child.col_offset)
        for child in ast.walk(node)
        if isinstance(child, ast.Return) and lines[child.lineno - 1].lstrip().startswith("return")
    ]
    for line, indent in sorted(places[:3], reverse=True):
        lines.insert(line, f"{' ' * indent}logger.debug('{node.name} returns')\n")
    lines.insert(_after_docstring(node.body[0]), f"    logger.debug('{node.name} begins')\n")
    return "".join(lines)


def delete_branch(text: str) -> str | None:
    """Delete the shortest `if` without `else` that is not all of its block."""
    found: list[tuple[int, int]] = []
    for parent in ast.walk(_function(text)):
        for block in (getattr(parent, "body", None), getattr(parent, "orelse", None)):
            if not isinstance(block, list) or len(block) < 2:
                continue
            for child in block:
                if isinstance(child, ast.If) and not child.orelse:
                    assert child.end_lineno is not None
                    found.append((child.lineno, child.end_lineno))
    lines = text.splitlines(keepends=True)
    found = [(first, last) for first, last in found if lines[first - 1].lstrip().startswith("if")]
    if not found:
        return None
    first, last = min(found, key=lambda span: (span[1] - span[0], span))
    return "".join(lines[: first - 1] + lines[last:])


EDITS: dict[str, Callable[[str], str | None]] = {
    "rename a variable": rename,
    "add an argument": add_argument,
    "insert logging": insert_logging,
    "delete a branch": delete_branch,
}

_SYSTEM = (
    "You are a careful engineer. Answer with one JSON object per turn, a tool call: "
    "read_file, search, str_replace, run_tests or finish.\n"
)


def agentic(seed: int = 0, tasks: int = 8, attempts: int = 3) -> list[Trace]:
    """Return conversations of a coding agent with its tools, `attempts` for each task.

    A task is one edit of one function. A turn is a request whose prompt is the conversation so
    far, results of tools included. Attempts at a task differ as samples do: in the wording of
    thoughts, in whether the agent searches first, and in line numbers. The order is by attempt.
    """
    traces: list[Trace] = []
    chosen = edits(seed + 1, tasks)
    for attempt in range(attempts):
        for task, trace in enumerate(chosen):
            rng = random.Random(f"{seed} {task} {attempt}")
            history = f"{_SYSTEM}Task {task}: {trace.kind} in src/module_{task}.py.\n"
            for turn, result in _turns(rng, task, trace):
                traces.append(Trace("agentic", history, turn))
                history += f"{turn}\n<result>\n{result}\n</result>\n"
    return traces


def _turns(rng: random.Random, task: int, trace: Trace) -> Iterator[tuple[str, str]]:
    """Yield the agent's calls with the tools' answers."""
    path = f"src/module_{task}.py"
    name = _function(trace.advice).name

    def call(tool: str, **arguments: str) -> str:
        thought = rng.choice(
            (
                f"I need to look at {name} before I change anything.",
                f"Next step for {name}: {tool}.",
                f"The task is to {trace.kind} in {name}, so I call {tool} now.",
            )
        )
        return json.dumps({"thought": thought, "tool": tool, "arguments": arguments}, indent=2)

    if rng.random() < 0.5:
        yield call("search", pattern=f"def {name}", path="src"), f"{path}:{rng.randint(1, 400)}"
    yield call("read_file", path=path), trace.advice
    old, new = _changed_lines(trace.advice, trace.output)
    yield call("str_replace", path=path, old=old, new=new), "replaced"
    failed = rng.random() < 0.5
    command = f"python -m pytest tests/test_module_{task}.py -q"
    yield call("run_tests", command=command), "1 failed" if failed else "12 passed"
    if failed:
        yield call("read_file", path=path), trace.output
        yield call("str_replace", path=path, old=new, new=new + "\n"), "replaced"
        yield call("run_tests", command=command), "12 passed"
    yield call("finish", summary=f"Done: {trace.kind} in {name}; all tests pass."), ""


def _changed_lines(before: str, after: str) -> tuple[str, str]:
    """Return the lines that differ, with two lines around them."""
    old, new = before.splitlines(), after.splitlines()
    first = next(i for i in range(len(old)) if i >= len(new) or old[i] != new[i])
    last = next(i for i in range(1, len(old) + 1) if i > len(new) or old[-i] != new[-i])
    first, last = max(0, first - 2), max(0, last - 3)
    return "\n".join(old[first : len(old) - last]), "\n".join(new[first : len(new) - last])


def _function(text: str) -> ast.FunctionDef:
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def _after_docstring(first: ast.stmt) -> int:
    """Return the line, from 0, before which the first statement goes."""
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    assert first.end_lineno is not None
    return first.end_lineno if is_docstring else first.lineno - 1


def _parses(text: str) -> bool:
    try:
        return isinstance(ast.parse(text).body[0], ast.FunctionDef)
    except (SyntaxError, IndexError):
        return False
