"""Outrider: speculative decoding for large language models as a distributed service.

`LLM` and what goes with it are loaded when they are asked for, since they bring torch along.
"""

import importlib

__version__ = "0.1.0"

_OFFLINE = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "SamplingParams": "params",
    "RequestOutputKind": "params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "pipeline": "pipeline",
    "PytorchEngineConfig": "pipeline",
    "SpeculativeConfig": "pipeline",
    "GenerationConfig": "pipeline",
}


def __getattr__(name: str) -> object:
    # By name, so that import-linter does not take the whole package to need torch.
    if name not in _OFFLINE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"outrider.offline.{_OFFLINE[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_OFFLINE]
