"""The two commands: train a head, and let the target write."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import shutil
import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer

from outrider.errors import ConfigError
from outrider.models.resolve import resolve_model
from outrider.train.data import (
    Source,
    Tokens,
    Windows,
    draft_vocabulary,
    hold_out,
    read_tokens,
    write_rows,
)
from outrider.train.dflash import DFlash, DFlashShape
from outrider.train.draft_model import DraftModel
from outrider.train.dspark import DSpark
from outrider.train.eagle3 import Eagle3
from outrider.train.evaluate import acceptance
from outrider.train.files import check_folder, round_module, write_checkpoint, writing
from outrider.train.head import Head
from outrider.train.layers import BlockShape
from outrider.train.mtp import Mtp
from outrider.train.one_shot import Medusa, MlpSpeculator
from outrider.train.processes import Processes
from outrider.train.target import Target, continue_rows, load_target, responses
from outrider.train.trainer import TrainConfig, Trainer

logger = logging.getLogger(__name__)

ROPE_THETA = 10_000.0
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "*.jinja")
LOGITS_PER_FORWARD = {"cuda": 2**28, "cpu": 2**24}
"""Most logits of one drafted position: larger parts are no faster."""
BYTES_PER_LOGIT = 130
"""Memory that a step takes for each, measured in float32; less on a GPU."""


def run_training(args: argparse.Namespace) -> None:
    """Train, evaluate on held-out text, and write `--out`. May raise `ConfigError`."""
    with _processes() as processes:
        _train(args, processes)


def run_responses(args: argparse.Namespace) -> None:
    """Write rows of prompt and continuation. May raise `ConfigError`."""
    with _processes() as processes:
        if processes.rank == 0:
            check_folder(args.out.parent)
        folder, target = _load(args, processes, args.prompt_length + args.new_tokens)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        arrays = [_checked(read_tokens(path, tokenizer), target) for path in args.data]
        rows = _generate(target, arrays, args, args.count, processes)
        if processes.rank == 0:
            write_rows(args.out, rows)


def _train(args: argparse.Namespace, processes: Processes) -> None:
    config = TrainConfig(
        steps=args.steps,
        seconds=args.seconds,
        unroll_steps=1 if args.method == "draft_model" else args.num_draft_tokens,
        lr=args.lr,
        table_lr=args.table_lr,
        save_steps=args.save_steps,
    )
    state = args.out / "state.pt"
    if processes.rank == 0:
        check_folder(args.out)
        if state.exists() and not args.resume:
            raise ConfigError(
                f"--out: {state} is an earlier run's: go on from it with --resume, or remove it."
            )
    length = max(args.length, args.prompt_length + args.new_tokens)
    folder, target = _load(args, processes, length)
    arrays, heldout = _read_data(args, folder, target)
    prompts = _heldout_prompts(heldout, args)
    if args.generate:
        arrays.append(_responses(target, arrays, args, processes))
    torch.manual_seed(args.seed)
    head = build_head(args, target, arrays).to(processes.device)
    processes.share_weights(head)
    parameters = sum(weight.numel() for weight in head.parameters())
    logger.info(f"{args.method}: {parameters:,} parameters")
    sources = [Source(array, args.length, args.seed) for array in arrays]
    windows = Windows(sources, args.tokens_per_step)
    at_once = tokens_per_forward(int(target.config.vocab_size), processes.device)
    config = replace(config, tokens_per_forward=at_once)
    trainer = Trainer(head, target, windows, config, state, processes)
    if args.resume:
        trainer.resume()
    with _stopped_by_signals(trainer):
        progress, finished = trainer.run()
    if not finished:
        logger.info(f"stopped after step {progress.step}; --resume goes on from there")
    elif processes.rank == 0:
        round_module(head, args.mantissa_bits)
        with writing(args.out):
            write_checkpoint(head.export(), args.out)
            if args.method == "draft_model":
                for pattern in TOKENIZER_FILES:
                    for file in folder.glob(pattern):
                        shutil.copy(file, args.out / file.name)
        logger.info(f"evaluating on {len(prompts)} held-out prompts")
        zero = torch.zeros(len(prompts), device=target.device)
        text = continue_rows(target, prompts.to(target.device), args.new_tokens // 2, zero)
        result = acceptance(head, target, text, prompts.shape[1], args.num_draft_tokens)
        for line in result.lines():
            logger.info(line)
        facts = {"parameters": parameters, **asdict(progress), **result.facts()}
        with writing(args.out):
            (args.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def tokens_per_forward(vocab_size: int, device: torch.device) -> int:
    """Return how many tokens one forward takes; on a GPU half of the free memory holds them."""
    logits = LOGITS_PER_FORWARD[device.type]
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        logits = min(logits, free // (2 * BYTES_PER_LOGIT))
    return max(1, logits // vocab_size)


@contextlib.contextmanager
def _processes() -> Iterator[Processes]:
    """Join the processes of a run, set up logging, and leave when all are through."""
    processes = Processes()
    try:
        level = logging.INFO if processes.rank == 0 else logging.WARNING
        logging.basicConfig(level=level, format="%(message)s", force=True)
        torch.set_float32_matmul_precision("high")
        transformers.utils.logging.disable_progress_bar()
        yield processes
        processes.wait()
    finally:
        processes.close()


@contextlib.contextmanager
def _stopped_by_signals(trainer: Trainer) -> Iterator[None]:
    """End training after its step at the first SIGINT or SIGTERM, the process at the second."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]

    def restore() -> None:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

    def stop(*_: object) -> None:
        trainer.stop()
        restore()

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()


def build_head(args: argparse.Namespace, target: Target, arrays: list[Tokens]) -> Head:
    """Return the method's fresh module. Raises `ConfigError` for sizes that do not fit."""
    steps = args.num_draft_tokens
    if args.method != "draft_model":
        target.check_widths()
    if args.method == "medusa":
        return Medusa(target, steps)
    if args.method == "mlp_speculator":
        return MlpSpeculator(target, steps, args.inner_size or target.config.hidden_size)
    shape = _shape(args, target.config)
    if args.method == "mtp":
        return Mtp(target, shape)
    if args.method == "draft_model":
        return DraftModel(target, shape, args.num_layers)
    sample = Source(arrays[0], args.length, args.seed).rows(0, 2).to(target.device)
    ids: Tensor | None = None
    vocab_size = int(target.config.vocab_size)
    if args.draft_vocab_size is not None and args.draft_vocab_size < vocab_size:
        ids = draft_vocabulary(arrays, vocab_size, args.draft_vocab_size)
        share = np.isin(arrays[-1], ids.numpy()).mean()
        logger.info(f"draft vocabulary: {len(ids)} tokens, {share:.2%} of the last --data")
    sizes = DFlashShape(shape, getattr(args, "num_layers", 1), steps)
    if args.method == "dflash":
        return DFlash(target, sizes, ids, sample)
    if args.method == "dspark":
        return DSpark(target, sizes, ids, sample, args.markov_rank)
    if target.config.num_hidden_layers < 7:
        raise ConfigError("eagle3 reads three layers' inputs, from layer 2 on: the target needs 7.")
    return Eagle3(target, shape, ids, sample)


def _shape(args: argparse.Namespace, config: Any) -> BlockShape:
    """Return a Llama layer's sizes by the flags, else the target's, else usual ones."""

    def setting(*names: str, default: Any) -> Any:  # architectures name them differently
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if value is not None), default)

    heads = args.heads or config.num_attention_heads
    kv_heads = args.kv_heads or setting("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(f"--heads {heads} is no multiple of --kv-heads {kv_heads}.")
    size = config.hidden_size
    head_dim = setting("head_dim", default=size // config.num_attention_heads)
    return BlockShape(
        hidden_size=getattr(args, "hidden_size", None) or size,
        intermediate_size=args.intermediate_size or setting("intermediate_size", default=4 * size),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=args.head_dim or head_dim,
        norm_eps=setting("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", default=1e-6),
        rope_theta=ROPE_THETA,
    )


def _load(args: argparse.Namespace, processes: Processes, length: int) -> tuple[Path, Target]:
    """Load the target, which must take rows of `length` tokens."""
    folder, device = resolve_model(args.target, "target"), processes.device
    target = load_target(folder, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    limit = target.config.max_position_embeddings
    if length > limit:
        raise ConfigError(f"Rows of {length} tokens: the target takes {limit} at most.")
    return folder, target


def _read_data(
    args: argparse.Namespace, folder: Path, target: Target
) -> tuple[list[Tokens], Tokens]:
    """Return the data to train on, and the data that is held out."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    arrays = [_checked(read_tokens(path, tokenizer), target) for path in args.data]
    if args.heldout is not None:
        return arrays, _checked(read_tokens(args.heldout, tokenizer), target)
    arrays[0], heldout = hold_out(arrays[0], args.length)
    return arrays, heldout


def _checked(array: Tokens, target: Target) -> Tokens:
    for token in (int(array.min()), int(array.max())) if array.size else ():
        if not 0 <= token < target.config.vocab_size:
            raise ConfigError(f"--data holds token {token}, which the target does not have.")
    return array


def _responses(
    target: Target, arrays: list[Tokens], args: argparse.Namespace, processes: Processes
) -> Tokens:
    """Return rows that the target writes, kept in `--out` for a run that goes on."""
    file = args.out / "responses.npy"
    # The first process looks, for all: to generate takes every one of them.
    if args.resume and processes.agree(float(file.is_file())):
        rows = _checked(read_tokens(file, None), target)
        logger.info(f"read {rows.shape} from {file}")
        return rows
    rows = _generate(target, arrays, args, args.generate, processes)
    if processes.rank == 0:
        write_rows(file, rows)
    return rows


def _generate(
    target: Target, arrays: list[Tokens], args: argparse.Namespace, count: int, processes: Processes
) -> Tokens:
    """Return rows `[count, prompt + new]`, their prompts from all data in equal shares."""
    count = max(count, processes.world_size)
    sources = [Source(array, args.prompt_length - 1, args.seed + 1) for array in arrays]
    shares = [count // len(sources) + (i < count % len(sources)) for i in range(len(sources))]
    parts = [source.rows(0, share) for source, share in zip(sources, shares, strict=True)]
    width = min(part.shape[1] for part in parts)
    prompts = torch.cat([part[:, :width] for part in parts])
    prompts = prompts[torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0))]
    seed = args.seed * processes.world_size + processes.rank
    logger.info(f"the target continues {len(prompts)} windows by {args.new_tokens} tokens each")
    part = responses(target, processes.share(prompts), args.new_tokens, args.generate_batch, seed)
    rows = processes.gather(part)
    logger.info(f"generated {tuple(rows.shape)}")
    return rows.numpy()


def _heldout_prompts(heldout: Tokens, args: argparse.Namespace) -> Tensor:
    """Return the prompts `[rows, prompt]` of the evaluation, shorter where the rows are.

    Raises `ConfigError`, before training.
    """
    if args.new_tokens // 2 < args.num_draft_tokens:
        raise ConfigError("--new-tokens must be twice --num-draft-tokens at least.")
    source = Source(heldout, args.prompt_length - 1, args.seed)
    return source.rows(0, min(args.eval_rows, source.count))
