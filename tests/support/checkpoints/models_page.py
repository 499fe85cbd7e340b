"""docs/models.md: what is served and what is refused, found by starting an engine on each.

`python -m tests.support.checkpoints.models_page` writes the page.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from outrider.errors import ConfigError, UnsupportedModelError
from outrider.models.local_files import check_target
from scorer_service.__main__ import resolve
from scorer_service.config import ScorerOptions
from scorer_service.core import build_engine
from tests.support.checkpoints.broken import BY_CONFIG, BY_FILES, BY_WEIGHTS, write_whole
from tests.support.checkpoints.modules import FORMATS
from tests.support.models.architectures import ARCHITECTURES, REFUSED, random_model

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
_INTRO = """\
# Models

```
outrider serve FOLDER-OR-ID
```

A checkpoint is served exactly, or refused in one line with exit code 2. Exactly means: every tensor that the model needs was read, every tensor in the files was used, shapes are those of config.json, numbers are finite, and a self-test at start agreed with the model's own forward pass in `transformers`. `make models` writes this page by starting an engine on a small checkpoint of each kind.

## Language models

Targets and draft models: a folder with config.json and safetensors in float32, float16, bfloat16 or [some 8-bit formats](engines.md#quantised-weights). Of a checkpoint with several modalities the text model is served. Other architectures of `transformers` are served too, if the self-test passes.
"""  # noqa: E501
_MODULES = """
## Draft modules

Safetensors, or `.bin` and `.pt` files, which are read without running code in them. [How they are recognised](drafting.md#eagle-and-eagle3).
"""  # noqa: E501
_REFUSED = """
## Refused

FOLDER stands for the model's folder. A tensor is harmless, and not asked for, in four cases: a rotary table or attention mask that older files hold (`rotary_emb.inv_freq`, `masked_bias`, `attn.bias`), prediction layers beside a target (`mtp.*`, layers behind the last one), towers of other modalities beside a text model, and copies of a target's embedding and output layer beside a module.
"""  # noqa: E501


def page() -> str:
    """Return the page's text."""
    with tempfile.TemporaryDirectory() as root:
        return _INTRO + "".join(f"{line}\n" for line in _lines(Path(root)))


def _lines(root: Path) -> Iterator[str]:
    yield from _table("model_type", "class")
    for name, build in ARCHITECTURES.items():
        model: Any = random_model(build, torch.float32)
        model.save_pretrained(folder := root / name)
        said = _start(folder)
        assert not said, said
        yield f"| `{model.config.model_type}` | `{type(model).__name__}` |"
    yield from _MODULES.splitlines()
    yield from _table("format", "method", "hidden states it reads")
    for i, (name, stored) in enumerate(FORMATS.items()):
        head = stored.load(*stored.write(root / f"module {i}"))
        layers = ", ".join(map(str, head.features.layers))
        states = f"entering layers {layers}" if layers else "after the final norm"
        yield f"| {name} | `{stored.method}` | {states} |"
    yield from _REFUSED.splitlines()
    yield from _table("architecture", "what the scorer says")
    for name, (build, _) in REFUSED.items():
        random_model(build, torch.float32).save_pretrained(folder := root / f"refused {name}")
        yield f"| {name} | {_refusal(folder)} |"
    yield from _table("checkpoint", "what the scorer says")
    for kind, damage in (BY_FILES | BY_CONFIG | BY_WEIGHTS).items():
        damage(write_whole(folder := root / f"broken {kind}".replace("/", " ")))
        yield f"| {kind} | {_refusal(folder)} |"


def _table(*columns: str) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)


def _refusal(folder: Path) -> str:
    said = _start(folder)
    assert said, f"{folder} is served"
    return said.replace(str(folder), "FOLDER").replace("|", "\\|").replace("<", "&lt;")


def _start(folder: Path) -> str:
    """Start an engine as a scorer does; return why it does not start."""
    small = {"max-num-seqs": 2, "max-num-batched-tokens": 8, "num-speculative-tokens": 0}
    small |= {"kv-cache-memory": 8, "max-model-len": 64}
    try:
        flags = resolve([f"--model={folder}", *(f"--{k}={v}" for k, v in small.items())])
        del flags["exit_with_parent"]
        check_target(str(folder))
        build_engine(folder, ScorerOptions(**flags))
    except (ConfigError, UnsupportedModelError) as error:
        return " ".join(error.message.split())
    return ""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
