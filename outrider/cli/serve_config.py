"""Resolve the flags of `serve` and `demo` for this machine and these models."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outrider.cli.serve_flags import PASSED
from outrider.cli.services import ServeConfig, gpu_index
from outrider.config import DTYPES, acceptance_rates
from outrider.engines import AUTO, NATIVE, VLLM, Wanted, check_rounding, check_synthetic, choose
from outrider.errors import ConfigError
from outrider.methods import COPYING_METHODS, HIDDEN_STATE_METHODS
from outrider.models.facts import brings_mtp, drafting_method, stored_dtype
from outrider.models.modules import MODULE_FILES
from outrider.models.resolve import EMBEDDED, find_local, resolve_model
from outrider.models.tokenizer import tokenizer_hash
from outrider.vllm.flags import (
    OWN_METHODS,
    gives_speculation,
    node_rank,
    num_devices,
    take_parallel_flags,
)

Say = Callable[[str], None]
"""Takes a line about what is done."""


def take_config(
    args: argparse.Namespace, say: Say, *, dry: bool = False, **fields: Any
) -> ServeConfig:
    """Return what the flags mean here, and download what is to be served, unless `dry`.

    `fields` are further fields of the configuration. Raises `ConfigError`.
    """
    name = _model_name(args)
    named: list[str] = getattr(args, "served_model_name", None) or []
    num_gpus = count_gpus()
    device = args.device or ("cuda" if num_gpus else "cpu")
    parallel = take_parallel_flags(vars(args))
    devices = num_devices(parallel)
    rates: tuple[float, ...] = getattr(args, "synthetic_acceptance_rates", None) or ()
    length: float | None = getattr(args, "synthetic_acceptance_length", None)
    synthetic = bool(rates) or length is not None
    if device != "cpu" and devices > num_gpus and not dry and "--nnodes" not in parallel:
        raise ConfigError(f"{' '.join(parallel)}: this machine has {num_gpus} GPUs.")
    models = _Models(say, dry=dry)
    target = models.folder(name)
    engine = _engine(args.engine, target, device, devices, dry=dry)
    check_rounding(engine, getattr(args, "quantization", None))  # the demo has no such flag
    check_synthetic(engine, asked=synthetic)
    vllm_flags = (*parallel, *getattr(args, "vllm_flags", ()))
    if node_rank(parallel):
        raise ConfigError("--node-rank: run `outrider scorer` on the machines after the first.")
    if vllm_flags and engine == NATIVE and target is not None:
        raise ConfigError(f"{' '.join(vllm_flags)}: flags of vLLM need --engine vllm.")
    methods, draft = _drafting(args, name, models)
    draft_device = args.draft_device
    if engine == VLLM:
        if gives_speculation(vllm_flags):
            methods, draft = (), None
        draft_device = draft_device or _beside_vllm(methods, device, num_gpus, devices)
    _check_tokenizers(name, draft, methods, models)
    config = ServeConfig(
        model=models.served(name),
        draft_model=None if draft is None else models.served(draft),
        methods=methods,
        device=device,
        draft_device=draft_device,
        engine=engine,
        vllm_flags=vllm_flags,
        dtype=_dtype(args.dtype, device, target, say, exact=not synthetic),
        num_speculative_tokens=args.num_speculative_tokens,
        speculation_policy=args.speculation_policy,
        served_model_name=named[0] if named else "default" if name == EMBEDDED else name,
        served_model_aliases=tuple(named[1:]),
        flags=_passed(args),
        **fields,
    )
    if synthetic and not methods:
        raise ConfigError(
            "Synthetic acceptance is of drafts, and with --method none or --num-speculative-tokens "
            "0 there are none: leave one of the two out."
        )
    acceptance_rates(rates, length, config.max_scored_tokens)
    return config


def _engine(asked: str, target: Path | None, device: str, devices: int, *, dry: bool) -> str:
    wanted = Wanted({}, device != "cpu", devices)
    if target is not None:
        wanted = Wanted.of(target, on_gpu=device != "cpu", num_devices=devices)
    elif asked == AUTO and devices <= 1:
        return NATIVE  # what is not here yet, a dry run cannot look into
    return choose(asked, wanted, installed=True if dry else None)


def count_gpus() -> int:
    """Return the number of CUDA devices that this process may use, asking the driver alone."""
    if "+cpu" in version("torch"):
        return 0  # this torch cannot use them
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):  # no driver
        return 0
    return 0 if failed else count.value


def _beside_vllm(
    methods: Sequence[str], device: str, num_gpus: int, num_devices: int
) -> str | None:
    """Return where proposers draft for vLLM, on its only GPU in its worker.

    None: vLLM drafts itself, by a head that it knows, or nobody does.
    """
    heads = not set(HIDDEN_STATE_METHODS).isdisjoint(methods)
    if not methods or (heads and len(methods) == 1 and methods[0] in OWN_METHODS):
        return None
    if device == "cpu" or COPYING_METHODS.issuperset(methods):
        return "cpu"
    first = gpu_index(device)
    free = [n for n in range(num_gpus) if not first <= n < first + num_devices]
    if free and not heads:
        return f"cuda:{free[0]}"
    return device if num_devices == 1 else None


def _model_name(args: argparse.Namespace) -> str:
    if args.model and args.named_model and args.model != args.named_model:
        raise ConfigError(f"two models were given: {args.model} and --model {args.named_model}.")
    name: str | None = args.model or args.named_model
    if name is None:
        raise ConfigError(
            "no model was given: outrider serve MODEL, which is a folder, a Hugging Face id, or "
            "embedded for the small model that ships with Outrider."
        )
    if name in ("scorer", "proposer", "gateway"):
        raise ConfigError(f"a single service is started by `outrider {name}`.")
    return name


class _Models:
    """The folders of models, downloaded when they are asked for."""

    def __init__(self, say: Say, *, dry: bool) -> None:
        self.say = say
        self._dry = dry
        self._folders: dict[str, Path | None] = {}

    def folder(self, name: str, role: str = "target") -> Path | None:
        """Return a model's folder; None for one that only a download would bring.

        A role is "target", "draft" (whatever the checkpoint is made for) or "head".
        """
        if name not in self._folders:
            self._folders[name] = self._find(name, role)
        return self._folders[name]

    def served(self, name: str) -> str:
        """Return what the services are told: a folder, so that each of them finds the same."""
        folder = self._folders.get(name)
        return name if name == EMBEDDED or folder is None else str(folder)

    def _find(self, name: str, role: str) -> Path | None:
        if find_local(name, role) is not None:
            return resolve_model(name, role)
        if self._dry:
            self.say(f"{name} is not on this machine: its files may change what is printed here")
            return None
        self.say(f"{name}: looking it up, and downloading what is not in the cache (minutes)")
        index = resolve_model(name, role, tokenizer_only=True)
        if role == "draft" and drafting_method(name, index) in HIDDEN_STATE_METHODS:
            role = "head"
        weights = MODULE_FILES if role == "head" else ("*.safetensors",)
        folder = resolve_model(name, role, weights=weights)
        self.say(f"{name}: all files are here")
        return folder


def _drafting(
    args: argparse.Namespace, model: str, models: _Models
) -> tuple[tuple[str, ...], str | None]:
    """Return the methods, and the checkpoint that they draft with; None: the embedded or none."""
    if args.num_speculative_tokens == 0:
        return (), None  # no request could ask for more, either
    draft: str | None = None if args.draft_model == EMBEDDED else args.draft_model
    target = models.folder(model)
    own_module = model != EMBEDDED and target is not None and brings_mtp(target)
    methods: tuple[str, ...] | None = args.method
    if methods is None:
        if draft is not None:
            methods = (drafting_method(draft, models.folder(draft, "draft")),)
        elif model == EMBEDDED:
            methods = ("draft_model",)
        else:
            methods = ("mtp",) if own_module else ("ngram",)
            models.say(
                "drafting by the checkpoint's own prediction module (--method mtp)"
                if "mtp" in methods
                else "drafting by prompt lookup (--method ngram): no --draft-model was given"
            )
    if (
        "mtp" in methods
        and draft is None
        and (own_module or (model != EMBEDDED and target is None))
    ):
        draft = model
    elif draft is not None:
        models.folder(draft, "head" if {*HIDDEN_STATE_METHODS} & {*methods} else "draft")
    return methods, draft


def _dtype(asked: str, device: str, folder: Path | None, say: Say, *, exact: bool) -> str:
    if asked != "auto":
        return asked
    if device == "cpu":
        same = ": the text is the same with and without speculation" if exact else ""
        say(f"dtype float32, as on any CPU{same}")
        return "float32"
    stored = "bfloat16" if folder is None else stored_dtype(folder)
    if stored not in DTYPES:
        raise ConfigError(f"the checkpoint's dtype is {stored}: give --dtype bfloat16 or another.")
    near = ": near ties may fall differently with speculation" if exact else ""
    say(f"dtype {stored}, the checkpoint's own{near}")
    return stored


def _check_tokenizers(
    model: str, draft: str | None, methods: Sequence[str], models: _Models
) -> None:
    """Raise `ConfigError`, before anything is loaded, for a draft of another tokenizer."""
    if "draft_model" not in methods or draft is None:
        return
    folders = [models.folder(model), models.folder(draft, "draft")]
    known = [each for each in folders if each and (each / "tokenizer.json").is_file()]
    if len(known) == 2 and len({tokenizer_hash(folder) for folder in known}) > 1:
        raise ConfigError(
            f"{draft} has another tokenizer than {model}: the same id would mean different text. "
            "Name another --draft-model, or draft without a model: --method ngram."
        )


def _passed(args: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    flags: dict[str, tuple[str, ...]] = {}
    for flag in PASSED:
        value = getattr(args, flag.name.replace("-", "_"), None)
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            said = ",".join(map(str, each)) if isinstance(each, tuple) else str(each)
            given = (f"--{flag.theirs or flag.name}", said)
            flags[flag.service] = (*flags.get(flag.service, ()), *given)
    for service, name in (("scorer", "enable-prefix-caching"), ("gateway", "playground")):
        if not getattr(args, name.replace("-", "_"), True):
            flags[service] = (*flags.get(service, ()), f"--no-{name}")
    return flags
