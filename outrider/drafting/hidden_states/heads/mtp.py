"""Multi-token prediction heads: DeepSeek's, Qwen's and RTP-LLM's differ only in how they are kept.

DeepSeek-V3's report, section 2.2: x = W [norm_e(e(t_{p+1})); norm_h(h_p)], one decoder layer, a
norm, and the target's own head; h_p is the target's state at p after its final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from outrider.drafting.hidden_states.checkpoints import TensorSource
from outrider.drafting.hidden_states.heads.base import (
    HeadShape,
    Place,
    RecurrentHead,
    spread,
    wanted_rows,
)
from outrider.drafting.hidden_states.heads.llama import LlamaLayer, Rotary
from outrider.engine.attention.base import (
    ATTENTION_NAME,
    PagedStep,
    StepAttention,
    paged_attention_forward,
)
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.layers.linear import Linear
from outrider.engine.layers.ops import Use
from outrider.engine.model.pack import prepack_linears
from outrider.engine.model.transformers_network import PagedCache
from outrider.features import FeatureSpec

AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


class LlamaModule:
    """A module around a Llama-like layer, in few operations: Qwen3.5 (dense), Qwen2, Llama."""

    capturable = True

    def __init__(
        self, source: TensorSource, rope: Tensor, shape: HeadShape, place: Place, index: int
    ) -> None:
        """`rope` is a table as of `rope_table`; `index` the layer of the pools.

        The gate of attention's output is read as `gate.weight`, where the source has it.
        """
        size, queries = shape.hidden_size, shape.num_heads * shape.head_dim

        def norm(name: str) -> Tensor:
            return place.put(source.tensor(f"{name}.weight", size))

        self._ops, self._eps, self._rope = place.ops, shape.eps, rope
        self._enorm, self._hnorm, self._norm = norm("enorm"), norm("hnorm"), norm("norm")
        self._input_norm = norm("block.input_layernorm")
        self._eh_proj = place.linear(source.tensor("eh_proj.weight", size, 2 * size))
        self._layer = LlamaLayer(source, "block.", shape, place, index=index, input_width=size)
        self._gate: Linear | None = None
        if "gate.weight" in source:
            self._gate = place.linear(source.tensor("gate.weight", queries, size).contiguous())
        self.uses: Sequence[Use] = (
            Use(self._eh_proj, alone=True),
            *(() if self._gate is None else (Use(self._gate, alone=True),)),
            *self._layer.uses(self._input_norm if self._gate is None else None),
        )

    def bind(self, pools: KVPools) -> None:
        self._layer.bind(pools)

    def forward(
        self, embedded: Tensor, states: Tensor, attention: StepAttention, rows: Tensor | None
    ) -> Tensor:
        """Map embeddings and states [n, H] to the decoder layer's output [m, H].

        `rows` int64 [m] are those whose output is wanted; None: all.
        """
        ops, eps = self._ops, self._eps
        parts = (
            ops.rms_norm(embedded, self._enorm, eps),
            ops.rms_norm(states.contiguous(), self._hnorm, eps),
        )
        x = self._eh_proj(torch.cat(parts, dim=-1))
        rope = self._rope.index_select(0, attention.batch.positions)
        if self._gate is None:
            qkv = ops.norm_linear(x, self._input_norm, eps, self._layer.qkv)
            return self._layer(qkv, x, rope, attention, None, rows)
        normed = ops.rms_norm(x, self._input_norm, eps)
        gate = self._gate(normed if rows is None else normed.index_select(0, rows)).sigmoid_()
        return self._layer(self._layer.qkv(normed), x, rope, attention, gate, rows)

    def norm(self, outputs: Tensor) -> Tensor:
        """Apply the last norm to `forward`'s outputs."""
        return self._ops.rms_norm(outputs, self._norm, self._eps)


class ModuleWeights(nn.Module):
    """The weights of a module: x = eh_proj [enorm(e); hnorm(h)], `block`, `norm`."""

    def __init__(self, block: nn.Module, hidden_size: int, eps: float) -> None:
        super().__init__()
        parts: Any = block
        norm_class = type(parts.input_layernorm)  # with its family's convention for the weight
        self.enorm = norm_class(hidden_size, eps=eps)
        self.hnorm = norm_class(hidden_size, eps=eps)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.block = block
        self.norm = norm_class(hidden_size, eps=eps)


class LayerModule:
    """A module around a decoder layer of `transformers`, with the methods of `LlamaModule`.

    The layer is made with `ATTENTION_NAME`. `latent`: it has multi-head latent attention.
    """

    capturable = False  # experts look on the host at which tokens they get
    uses: Sequence[Use] = ()  # run one by one: there is no sequence to measure them in

    def __init__(self, weights: ModuleWeights, rotary: Rotary, *, latent: bool) -> None:
        prepack_linears(weights.eval().requires_grad_(False))
        self._weights: Any = weights
        self._rotary = rotary
        self._latent = latent
        self._cache: PagedCache | None = None
        self._pool_of: Any = None

    def bind(self, pools: KVPools) -> None:
        self._cache = PagedCache(pools, latent=self._latent)
        self._pool_of = None if self._latent else pools.layer

    def forward(
        self, embedded: Tensor, states: Tensor, attention: StepAttention, rows: Tensor | None
    ) -> Tensor:
        assert self._cache is not None, "bind() comes first"
        self._cache.begin(attention)
        weights, block, positions = self._weights, self._weights.block, attention.batch.positions
        joined = torch.cat((weights.enorm(embedded), weights.hnorm(states)), dim=-1)
        x = weights.eh_proj(joined)[None]
        attended, _ = block.self_attn(
            hidden_states=block.input_layernorm(x),
            attention_mask=None,
            position_ids=positions[None],
            position_embeddings=self._rotary(x, positions[None]),
            past_key_values=self._cache,
            paged=PagedStep(attention, self._pool_of),
        )
        x = x + attended
        if rows is not None:
            x = x.index_select(1, rows)
        output: Tensor = x + block.mlp(block.post_attention_layernorm(x))
        return output[0]

    def norm(self, outputs: Tensor) -> Tensor:
        normed: Tensor = self._weights.norm(outputs)
        return normed


class MtpHead(RecurrentHead):
    """A `RecurrentHead` of n modules, of which step k drafts with module k mod n.

    Every module runs over every row, since its keys and values must be there when its step comes.
    Those of true rows are made from the target's states in all modules. (Modules were trained on
    the output of the module before, which is an estimate of the same state.)
    """

    def __init__(
        self,
        modules: Sequence[LlamaModule] | Sequence[LayerModule],
        shape: HeadShape,
        place: Place,
        embedding: Tensor,
        head: Tensor,
        *,
        draft_ids: Tensor | None,
        feed_back_raw: bool,
    ) -> None:
        """`head` has a row for each of `draft_ids`, int64, or for all tokens of the target.

        With `feed_back_raw` rows past the committed text take the decoder layer's output in place
        of a target's state, else the normed output that logits are made of.
        """
        super().__init__(shape, place, modules, embedding)
        self._modules = modules
        self._head = place.linear(head)
        self._draft_ids = None if draft_ids is None else draft_ids.to(place.device)
        self._raw = feed_back_raw
        self.features = FeatureSpec(hidden_size=shape.hidden_size, final_norm=True)
        self.capturable = all(module.capturable for module in modules)
        of_modules = [use for module in modules for use in module.uses]
        self.uses = (*of_modules, Use(self._head, alone=True))

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, states: Tensor, attention: StepAttention, step: int
    ) -> Tensor:
        """Return outputs [m, H], normed; with raw feedback [m, 2 H]: normed, then not normed."""
        embedded, rows = self._embed(token_ids), wanted_rows(attention.batch)
        outputs = [module.forward(embedded, states, attention, rows) for module in self._modules]
        index = step % len(self._modules)
        normed = self._modules[index].norm(outputs[index])
        return torch.cat((normed, outputs[index]), dim=-1) if self._raw else normed

    def feed_back(self, outputs: Tensor) -> Tensor:
        return outputs[:, -self.state_size :]

    @torch.inference_mode()
    def logits(self, outputs: Tensor) -> Tensor:
        known = self._head(outputs[:, : self.state_size].contiguous())
        return spread(known, self._draft_ids, self.vocab_size)
