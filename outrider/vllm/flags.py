"""The command line of vLLM that serves what a scorer's flags ask for. Imports no vLLM."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import Any, Final

from outrider.errors import ConfigError
from outrider.flag_types import positive

PARALLEL_FLAGS: Final[dict[str, tuple[type | None, str]]] = {
    "--tensor-parallel-size": (int, "devices that share each layer"),
    "--pipeline-parallel-size": (int, "groups of devices that share the layers"),
    "--data-parallel-size": (int, "copies of the model"),
    "--enable-expert-parallel": (None, "spread experts over the devices instead of parts of each"),
    "--nnodes": (int, "machines of the model"),
    "--node-rank": (int, "number of this machine, from 0; only the first one serves"),
    "--master-addr": (str, "address of the first machine"),
    "--master-port": (int, "port there, at which the machines meet"),
}
"""Flags of vLLM that a scorer takes under the same names, with their help; None: without a value.
"""
SIZES: Final = frozenset(
    {"--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--nnodes"}
)
"""Those among them that say nothing if they are 1."""

_SHORT: Final = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
}
"""vLLM's short names of them."""

OWN_METHODS: Final = (
    *("ngram", "suffix", "draft_model", "eagle", "eagle3"),
    *("mtp", "medusa", "mlp_speculator"),
)
"""Methods by which vLLM can speculate itself, under names of ours."""
OWN_SETTINGS: Final = frozenset(
    {
        *("prompt_lookup_max", "prompt_lookup_min", "max_model_len"),
        *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
        *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
    }
)
"""Keys of vLLM's `speculative_config` with the meaning of a proposer's flag."""


def add_parallel_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `PARALLEL_FLAGS`."""
    group = parser.add_argument_group("several devices, with --engine vllm: vLLM's own flags")
    for flag, (kind, text) in PARALLEL_FLAGS.items():
        if kind is None:
            group.add_argument(flag, action="store_true", help=text)
        else:
            group.add_argument(
                flag, type=positive if flag in SIZES else kind, metavar="X", help=text
            )


def take_parallel_flags(args: dict[str, Any]) -> tuple[str, ...]:
    """Take those that were given out of parsed flags, in vLLM's words."""
    words: list[str] = []
    for flag in PARALLEL_FLAGS:
        value = args.pop(flag[2:].replace("-", "_"), None)
        if value not in (None, False) and not (flag in SIZES and value == 1):
            words += [flag] if value is True else [flag, str(value)]
    return tuple(words)


def num_devices(flags: Sequence[str]) -> int:
    """Return over how many devices flags in vLLM's words spread a model."""
    sizes = SIZES - {"--nnodes"}  # which the others are spread over
    return prod(_size_of(flag, flags) for flag in sizes)


def gives_speculation(flags: Sequence[str]) -> bool:
    """Return whether flags in vLLM's words choose how it speculates."""
    return not {"--speculative-config", "-sc"}.isdisjoint(_names(flags))


def _names(flags: Sequence[str]) -> set[str]:
    """Return the words without values that follow behind = or as a field's behind a dot."""
    return {word.partition("=")[0].partition(".")[0].replace("_", "-") for word in flags}


def node_rank(flags: Sequence[str]) -> int:
    """Return the number of this machine among those that share a model; the first is 0."""
    return _number("--node-rank", flags, 0)


def _size_of(flag: str, flags: Sequence[str]) -> int:
    return _number(flag, flags, 1)


def _number(flag: str, flags: Sequence[str], otherwise: int) -> int:
    """Return the last value of a flag in any of vLLM's spellings, if it is a number."""
    value = ""
    for word, after in zip_longest(flags, flags[1:], fillvalue=""):
        name, equals, joined = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if _SHORT.get(name, name) == flag:
            value = joined if equals else after
    return int(value) if value.isascii() and value.isdigit() else otherwise


def check_hosting(data: int, pipeline: int, nodes: int) -> None:
    """Refuse ways to spread a model of which no worker could host a scorer's draft side.

    Raises `ConfigError`.
    """
    without = (
        "give --num-speculative-tokens 0, or vLLM's own --speculative-config after -- "
        "(docs/vllm.md)."
    )
    if data > 1:
        raise ConfigError(
            "--data-parallel-size takes no proposers: start a scorer for each replica, or "
            f"{without}"
        )
    if pipeline > 1 and nodes > 1:
        raise ConfigError(
            "--pipeline-parallel-size over several machines (--nnodes) takes no proposers: they "
            "would have to dial the last stage's machine, not the scorer's. Spread the model by "
            f"--tensor-parallel-size alone, or {without}"
        )


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """A scorer's settings for vLLM. 0 and None leave a choice to vLLM."""

    model: str
    served_model_name: str
    dtype: str
    device: str = "cuda"
    num_speculative_tokens: int = 0
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 0
    max_model_len: int | None = None
    kv_cache_memory: int | None = None  # MiB
    gpu_memory_utilization: float = 0.9
    page_size: int = 0
    enable_prefix_caching: bool = True
    draft_flags: tuple[str, ...] = ()
    """Flags of the draft side, which vLLM's worker hosts (`draft_server.ServerOptions`)."""
    more: tuple[str, ...] = ()
    """Flags in vLLM's own words. They come last, so they win."""

    def follow_argv(self, folder: str) -> list[str]:
        """Return the words after `python -m` for machines after the first, which serve nothing."""
        _, _, *flags = self.argv(folder)  # the model is no flag there
        return ["vllm.entrypoints.cli.main", "serve", folder, "--headless", *flags]

    @property
    def own_speculation(self) -> bool:
        """Tell whether vLLM's own words choose how it speculates."""
        return gives_speculation(self.more)

    @property
    def takes_proposers(self) -> bool:
        """Tell whether vLLM's worker hosts a draft side."""
        return self.num_speculative_tokens > 0 and not self.own_speculation

    def _hosting(self) -> list[str]:
        check_hosting(
            _size_of("--data-parallel-size", self.more),
            _size_of("--pipeline-parallel-size", self.more),
            _size_of("--nnodes", self.more),
        )
        config = {
            "method": "custom_class",
            "model": "outrider.vllm.proposer.RemoteProposer",
            "num_speculative_tokens": self.num_speculative_tokens,
        }
        return [
            *("--speculative-config", json.dumps(config)),
            *("--additional-config", json.dumps({"outrider": shlex.join(self.draft_flags)})),
        ]

    def _check_more(self) -> None:
        """Refuse flags whose values the scorer goes by. Raises `ConfigError`."""
        names = _names(self.more)
        if "--model" in names:
            raise ConfigError("--model cannot be given after --: give the scorer's own --model.")
        hosting = sorted({"--additional-config", "--worker-cls"} & names)
        if hosting and self.takes_proposers:
            raise ConfigError(
                f"{hosting[0]} cannot be given after -- with proposers, which need their own: give "
                "--num-speculative-tokens 0, or run `vllm serve` with the plug-in (docs/vllm.md)."
            )

    def argv(self, folder: str, *, has_tokenizer: bool = True) -> list[str]:
        """Return vLLM's flags for a model's folder. Raises `ConfigError`."""
        if self.device not in ("cpu", "cuda", "cuda:0"):
            raise ConfigError(
                f"--device {self.device} cannot be given with --engine vllm: set "
                f"CUDA_VISIBLE_DEVICES={self.device.removeprefix('cuda:')}, and --device cuda."
            )
        self._check_more()
        flags: list[object] = ["--model", folder, "--served-model-name", self.served_model_name]
        flags += ["--dtype", self.dtype, "--max-num-seqs", self.max_num_seqs]
        flags += ["--gpu-memory-utilization", self.gpu_memory_utilization]
        # What ends a text, and how it is sampled, is said with each request.
        flags += ["--generation-config", "vllm"]
        # The language of constraints is llguidance's, as with the native engine.
        flags += ["--structured-outputs-config", json.dumps({"backend": "guidance"})]
        flags += [f"--{'' if self.enable_prefix_caching else 'no-'}enable-prefix-caching"]
        for flag, value in (
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--max-model-len", self.max_model_len),
            ("--kv-cache-memory-bytes", (self.kv_cache_memory or 0) * 2**20),
            ("--block-size", self.page_size),
        ):
            if value:
                flags += [flag, value]
        if not has_tokenizer:
            flags += ["--skip-tokenizer-init"]
        if self.takes_proposers:
            flags += self._hosting()
        if self.takes_proposers or self.device == "cpu":  # there the worker mends seeded requests
            worker = "CPUWorker" if self.device == "cpu" else "GPUWorker"
            flags += ["--worker-cls", f"outrider.vllm.worker.{worker}"]
        return [*map(str, flags), *self.more]
