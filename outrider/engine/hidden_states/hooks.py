"""Captures hidden states from the modules of `transformers` as they run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.kv_cache.hidden_states import HiddenStatePool
from outrider.errors import UnsupportedModelError


class HiddenStateHooks:
    """Hooks on the decoder layers that were asked for, and on what the head reads.

    Raises `UnsupportedModelError` for a model whose layers it cannot tell.
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
        """int64 [num_tokens]: where the forward that is about to run writes; None: nowhere."""
        for layer in pool.spec.layers:
            if layer < count:
                layers[layer].register_forward_pre_hook(self._before(layer), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(self._after(layer))
        if pool.spec.final_norm:
            decoder.register_forward_hook(self._at_the_end)

    def _before(self, layer: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep(layer, args[0] if args else kwargs["hidden_states"])

        return hook

    def _after(self, layer: int) -> Any:
        def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            self._keep(layer, output if isinstance(output, Tensor) else output[0])

        return hook

    def _at_the_end(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if self.slots is not None:
            self._pool.final(self.slots, self._rows(output[0]))

    def _keep(self, layer: int, hidden: Tensor) -> None:
        if self.slots is not None:
            self._pool.enter(layer, self.slots, self._rows(hidden))

    def _rows(self, hidden: Tensor) -> Tensor:
        assert self.slots is not None
        shape = (1, len(self.slots), self._pool.spec.hidden_size)
        if hidden.shape != torch.Size(shape):
            raise UnsupportedModelError(
                f"A layer hands on states of shape {tuple(hidden.shape)}, not {shape}: they cannot "
                "be captured. Serve this model without --hidden-features."
            )
        return hidden[0]
