"""Captures hidden states from the modules of `transformers` as they run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.kv_cache.hidden_states import HiddenStatePool
from outrider.errors import UnsupportedModelError


class HiddenStateHooks:
    """Hooks on decoder layers, and on the input of the head.

    Raises `UnsupportedModelError` for a model whose layers are not found.
    """

    def __init__(self, model: nn.Module, pool: HiddenStatePool) -> None:
        parts: Any = model
        decoder: Any = parts.get_decoder()
        count = int(parts.config.get_text_config(decoder=True).num_hidden_layers)
        lists = [
            child
            for child in decoder.children()
            if isinstance(child, nn.ModuleList) and len(child) == count
        ]
        if len(lists) != 1:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot capture hidden states: its decoder layers are not "
                "one list of modules. Serve it without --hidden-features."
            )
        [layers] = lists
        self._pool = pool
        self.slots: Tensor | None = None
        """int64 [num_tokens]: where the next forward writes its states; None: nowhere."""
        for layer in pool.spec.layers:
            keep = partial(self._keep, partial(pool.enter, layer))
            if layer < count:
                layers[layer].register_forward_pre_hook(partial(_input, keep), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(partial(_output, keep))
        if pool.spec.final_norm:
            decoder.register_forward_hook(partial(_output, partial(self._keep, pool.final)))

    def _keep(self, write: Callable[[Tensor, Tensor], None], hidden: Tensor) -> None:
        if self.slots is None:
            return
        shape = (1, len(self.slots), self._pool.spec.hidden_size)
        if hidden.shape != torch.Size(shape):
            raise UnsupportedModelError(
                f"A layer hands on states of shape {tuple(hidden.shape)}, not {shape}: they cannot "
                "be captured. Serve this model without --hidden-features."
            )
        write(self.slots, hidden[0])


def _input(
    keep: Callable[[Tensor], None], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    keep(args[0] if args else kwargs["hidden_states"])


def _output(keep: Callable[[Tensor], None], _: nn.Module, _args: Any, output: Any) -> None:
    keep(output if isinstance(output, Tensor) else output[0])
