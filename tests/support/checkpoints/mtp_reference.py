"""Multi-token prediction heads in float64, straight from the formulas: no cache, no batch.

Draft row p takes token t_(p+1) and the target's state at p. Sources: DeepSeek-V3's report
(section 2.2) and the notes with its weights; Qwen3-Next and Qwen3.5 as published; RTP-LLM's loader
of `qwen_2-mtp`. Everything is computed anew for every draft token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.checkpoints.mtp_checkpoints import MtpCheckpoint

Module = Callable[[Tensor, Tensor], Tensor]
"""Embeddings [n, H] and states [n, H] of rows 0..n-1 to m [n, H], before the last norm."""


class Reference:
    """A head as float64 functions of whole rows."""

    def __init__(
        self,
        modules: Sequence[tuple[Module, Callable[[Tensor], Tensor]]],
        embedding: Tensor,
        head: Tensor,
        draft_ids: Sequence[int] | None = None,
    ) -> None:
        self._modules = modules
        self._embedding = embedding.double()
        self._head = head.double()
        self._draft_ids = draft_ids

    def rows(
        self, tokens: Sequence[int], states: Tensor, module: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """m, its norm and logits of rows (tokens[p], states[p])."""
        block, norm = self._modules[module]
        raw = block(self._embedding[list(tokens)], states.double())
        normed = norm(raw)
        logits = normed @ self._head.T
        if self._draft_ids is not None:
            full = torch.full((len(logits), len(self._embedding)), float("-inf")).double()
            full[:, list(self._draft_ids)] = logits
            logits = full
        return raw, normed, logits

    def after(
        self,
        tokens: Sequence[int],
        states: Tensor,
        path: Sequence[int],
        *,
        feed_back_raw: bool = False,
    ) -> Tensor:
        """Logits [V] for what follows draft tokens `path`; true rows are (tokens[p], states[p])."""
        rows, states = list(tokens), states.double()
        for step in range(len(path) + 1):
            raw, normed, logits = self.rows(rows, states, step % len(self._modules))
            rows += path[step : step + 1]
            states = torch.cat([states, (raw if feed_back_raw else normed)[-1:]])
        return logits[-1]

    def draft(
        self, tokens: Sequence[int], states: Tensor, num_tokens: int, *, feed_back_raw: bool = False
    ) -> list[Tensor]:
        """Logits [V] of greedy draft tokens."""
        found: list[Tensor] = []
        for _ in range(num_tokens):
            path = [int(logits.argmax()) for logits in found]
            found.append(self.after(tokens, states, path, feed_back_raw=feed_back_raw))
        return found


def deepseek(checkpoint: MtpCheckpoint) -> Reference:
    """`model.layers.{N}.*`: x = W_eh [RMS_e(e); RMS_h(h)], a block with experts, shared_head.

    Its attention has latents (DeepSeek) or is GLM-4.5's.
    """
    config, w = checkpoint.config, _double(checkpoint)
    layers = sorted({int(name.split(".")[2]) for name in w if name.endswith("eh_proj.weight")})

    def module(layer: int) -> tuple[Module, Callable[[Tensor], Tensor]]:
        at = f"model.layers.{layer}."

        def block(embedded: Tensor, states: Tensor) -> Tensor:
            joined = torch.cat(
                [_rms(embedded, w[at + "enorm.weight"]), _rms(states, w[at + "hnorm.weight"])], -1
            )
            x = joined @ w[at + "eh_proj.weight"].T
            attend = _grouped if "partial_rotary_factor" in config else _mla
            x = x + attend(_rms(x, w[at + "input_layernorm.weight"]), w, at + "self_attn.", config)
            inner = _rms(x, w[at + "post_attention_layernorm.weight"])
            return x + _deepseek_experts(inner, w, at + "mlp.", config)

        return block, lambda m: _rms(m, w[at + "shared_head.norm.weight"])

    target = w if not checkpoint.target_tensors else checkpoint.target_tensors
    embedding = target["model.embed_tokens.weight"]
    head = target.get("lm_head.weight", embedding)
    return Reference([module(layer) for layer in layers], embedding, head)


def _mla(x: Tensor, w: dict[str, Tensor], at: str, config: dict[str, Any]) -> Tensor:
    n, heads = len(x), config["num_attention_heads"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    low = _rms(x @ w[at + "q_a_proj.weight"].T, w[at + "q_a_layernorm.weight"])
    query = (low @ w[at + "q_b_proj.weight"].T).view(n, heads, nope + rope)
    low = x @ w[at + "kv_a_proj_with_mqa.weight"].T
    latent = _rms(low[:, : config["kv_lora_rank"]], w[at + "kv_a_layernorm.weight"])
    key_rope = _rotate_pairs(low[:, config["kv_lora_rank"] :][:, None], config["rope_theta"])
    expanded = (latent @ w[at + "kv_b_proj.weight"].T).view(n, heads, nope + config["v_head_dim"])
    query = torch.cat(
        [query[..., :nope], _rotate_pairs(query[..., nope:], config["rope_theta"])], -1
    )
    key = torch.cat([expanded[..., :nope], key_rope.expand(n, heads, rope)], -1)
    out = _attend(query, key, expanded[..., nope:])
    return out.reshape(n, -1) @ w[at + "o_proj.weight"].T


def _grouped(x: Tensor, w: dict[str, Tensor], at: str, config: dict[str, Any]) -> Tensor:
    n, dim = len(x), config["head_dim"]
    query, key, value = (
        (x @ w[f"{at}{c}_proj.weight"].T + w[f"{at}{c}_proj.bias"]).view(n, -1, dim) for c in "qkv"
    )
    rotary = int(dim * config["partial_rotary_factor"])
    query = _rotate_halves(_rms(query, w[at + "q_norm.weight"]), config["rope_theta"], rotary)
    key = _rotate_halves(_rms(key, w[at + "k_norm.weight"]), config["rope_theta"], rotary)
    return _attend(query, key, value).reshape(n, -1) @ w[at + "o_proj.weight"].T


def _deepseek_experts(x: Tensor, w: dict[str, Tensor], at: str, config: dict[str, Any]) -> Tensor:
    scores = (x @ w[at + "gate.weight"].T).sigmoid()
    biased = scores + w[at + "gate.e_score_correction_bias"]
    groups, per_group = config["n_group"], biased.shape[1] // config["n_group"]
    out = _dense(x, w, at + "shared_experts.")
    for i in range(len(x)):
        by_group = biased[i].view(groups, per_group)
        strength = by_group.sort(descending=True).values[:, :2].sum(-1)
        allowed = strength.argsort(descending=True)[: config["topk_group"]].tolist()
        candidates = [e for e in range(biased.shape[1]) if e // per_group in allowed]
        candidates.sort(key=lambda e: -float(biased[i, e]))
        picked = candidates[: config["num_experts_per_tok"]]
        total = scores[i, picked].sum()
        for expert in picked:
            factor = scores[i, expert] / total * config["routed_scaling_factor"]
            out[i] = out[i] + factor * _dense(x[i : i + 1], w, f"{at}experts.{expert}.")[0]
    return out


def qwen(checkpoint: MtpCheckpoint) -> Reference:
    """`mtp.*`: zero-centred norms, gated full attention with a partial rotary embedding."""
    config, w = checkpoint.config, _double(checkpoint)
    config = config.get("text_config", config)

    def norm(x: Tensor, name: str) -> Tensor:
        return _rms(x, 1 + w[name])

    def block(embedded: Tensor, states: Tensor) -> Tensor:
        joined = torch.cat(
            [
                norm(embedded, "mtp.pre_fc_norm_embedding.weight"),
                norm(states, "mtp.pre_fc_norm_hidden.weight"),
            ],
            -1,
        )
        x = joined @ w["mtp.fc.weight"].T
        at, n = "mtp.layers.0.self_attn.", len(x)
        inner = norm(x, "mtp.layers.0.input_layernorm.weight")
        heads, dim = config["num_attention_heads"], config["head_dim"]
        both = (inner @ w[at + "q_proj.weight"].T).view(n, heads, 2 * dim)
        query, gate = both[..., :dim], both[..., dim:]
        key = (inner @ w[at + "k_proj.weight"].T).view(n, -1, dim)
        value = (inner @ w[at + "v_proj.weight"].T).view(n, -1, dim)
        rotary = int(dim * config["partial_rotary_factor"])
        query = _rotate_halves(norm(query, at + "q_norm.weight"), config["rope_theta"], rotary)
        key = _rotate_halves(norm(key, at + "k_norm.weight"), config["rope_theta"], rotary)
        out = _attend(query, key, value) * gate.sigmoid()
        x = x + out.reshape(n, -1) @ w[at + "o_proj.weight"].T
        inner = norm(x, "mtp.layers.0.post_attention_layernorm.weight")
        if "mtp.layers.0.mlp.gate_proj.weight" in w:
            return x + _dense(inner, w, "mtp.layers.0.mlp.")
        return x + _qwen_experts(inner, w, "mtp.layers.0.mlp.", config)

    embedding = next(w[name] for name in w if name.endswith("embed_tokens.weight"))
    head = w.get("lm_head.weight", embedding)
    return Reference([(block, lambda m: norm(m, "mtp.norm.weight"))], embedding, head)


def _qwen_experts(x: Tensor, w: dict[str, Tensor], at: str, config: dict[str, Any]) -> Tensor:
    shared = (x @ w[at + "shared_expert_gate.weight"].T).sigmoid()
    out = shared * _dense(x, w, at + "shared_expert.")
    probs = (x @ w[at + "gate.weight"].T).softmax(-1)
    for i in range(len(x)):
        order = probs[i].argsort(descending=True)
        picked = order[: config["num_experts_per_tok"]].tolist()
        total = probs[i, picked].sum()
        for expert in picked:
            if at + "experts.gate_up_proj" in w:
                gate, up = (w[at + "experts.gate_up_proj"][expert] @ x[i]).chunk(2)
                y = w[at + "experts.down_proj"][expert] @ (gate * gate.sigmoid() * up)
            else:
                y = _dense(x[i : i + 1], w, f"{at}experts.{expert}.")[0]
            out[i] = out[i] + probs[i, expert] / total * y
    return out


def rtp_qwen2(checkpoint: MtpCheckpoint) -> Reference:
    """RTP-LLM's: x = [RMS_h(h); RMS_e(e)] @ W with W [2H, H], a Qwen2 layer, its own head."""
    config, w = checkpoint.config, _double(checkpoint)

    def module(layer: int) -> tuple[Module, Callable[[Tensor], Tensor]]:
        at = f"model.layers.{layer}."

        def block(embedded: Tensor, states: Tensor) -> Tensor:
            joined = torch.cat(
                [_rms(states, w[at + "h_norm.weight"]), _rms(embedded, w[at + "e_norm.weight"])], -1
            )
            x = joined @ w[at + "eh_proj.weight"]
            inner = _rms(x, w[at + "input_layernorm.weight"])
            n, dim = len(x), config["hidden_size"] // config["num_attention_heads"]
            query, key, value = (
                (inner @ w[f"{at}self_attn.{c}_proj.weight"].T + w[f"{at}self_attn.{c}_proj.bias"])
                for c in "qkv"
            )
            out = _attend(
                _rotate_halves(query.view(n, -1, dim), config["rope_theta"], dim),
                _rotate_halves(key.view(n, -1, dim), config["rope_theta"], dim),
                value.view(n, -1, dim),
            )
            x = x + out.reshape(n, -1) @ w[at + "self_attn.o_proj.weight"].T
            inner = _rms(x, w[at + "post_attention_layernorm.weight"])
            return x + _dense(inner, w, at + "mlp.")

        return block, lambda m: _rms(m, w[at + "final_head.norm.weight"])

    modules = [module(layer) for layer in range(config["num_hidden_layers"])]
    ids = w["model.d2t"].tolist() if "model.d2t" in w else None
    return Reference(
        modules, w["model.embed_tokens.weight"], w["lm_head.weight"], ids and list(map(int, ids))
    )


def _double(checkpoint: MtpCheckpoint) -> dict[str, Tensor]:
    """Tensors in float64; float8 blocks times their factors."""
    blocks = checkpoint.config.get("quantization_config", {}).get("weight_block_size")
    found: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        if name.endswith("_scale_inv"):
            continue
        value = tensor.double()
        if tensor.dtype is torch.float8_e4m3fn:
            factors = checkpoint.tensors[name + "_scale_inv"].double()
            for i in range(value.shape[0]):
                for j in range(value.shape[1]):
                    value[i, j] *= factors[i // blocks[0], j // blocks[1]]
        found[name] = value
    return found


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _dense(x: Tensor, w: dict[str, Tensor], at: str) -> Tensor:
    gate = x @ w[at + "gate_proj.weight"].T
    return (gate * gate.sigmoid() * (x @ w[at + "up_proj.weight"].T)) @ w[at + "down_proj.weight"].T


def _angles(n: int, dim: int, theta: float) -> Tensor:
    frequencies = theta ** (-torch.arange(0, dim, 2).double() / dim)
    return torch.arange(n).double()[:, None] * frequencies  # [n, dim / 2]


def _rotate_pairs(x: Tensor, theta: float) -> Tensor:
    """Turns the pairs (x_0, x_1), (x_2, x_3), ... of [n, heads, dim] by the row's angles."""
    angles = _angles(len(x), x.shape[-1], theta)[:, None]
    turned = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * turned).flatten(-2)


def _rotate_halves(x: Tensor, theta: float, rotary: int) -> Tensor:
    """Turns the pairs (x_i, x_(i + rotary / 2)) of [n, heads, dim]; the rest stays."""
    angles = _angles(len(x), rotary, theta)[:, None]
    low, high, rest = x[..., : rotary // 2], x[..., rotary // 2 : rotary], x[..., rotary:]
    return torch.cat(
        [
            low * angles.cos() - high * angles.sin(),
            high * angles.cos() + low * angles.sin(),
            rest,
        ],
        -1,
    )


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of [n, heads, dim] over [n, kv_heads, dim]."""
    n, heads, dim = query.shape
    key = key.repeat_interleave(heads // key.shape[1], 1)
    value = value.repeat_interleave(heads // value.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / dim**0.5
    scores += torch.full((n, n), float("-inf")).double().triu(1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
