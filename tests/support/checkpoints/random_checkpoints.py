"""Small random checkpoints: any architecture, any settings, and files damaged in any way."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.models.weight_files import INDEX, WEIGHTS

Tensors = dict[str, Tensor]
Damage = Callable[[Path, random.Random], None]

COMMON_KINDS = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "opt"),
    *("mixtral", "olmo2", "glm4_moe", "gpt_oss", "cohere2", "bert", "falcon", "mamba"),
)
ALL_KINDS = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
_LARGEST = 300_000  # weights: larger ones lack the settings that make them small
_SIZES: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    # Other names, and mixtures.
    **dict.fromkeys(("n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("n_head", "num_heads", "decoder_attention_heads", "num_experts"), 4),
    **dict.fromkeys(("n_layer", "num_layers", "decoder_layers", "num_experts_per_tok"), 2),
    **dict.fromkeys(("n_inner", "ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **{"q_lora_rank": 16, "kv_lora_rank": 12, "n_positions": 128},
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "tie_word_embeddings": (True, False),
    "sliding_window": (None, 5, 12),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 1),
    "layer_types": ([_FULL] * 2, [_SLIDING] * 2, [_SLIDING, _FULL], [_FULL, "chunked_attention"]),
    "attention_bias": (True, False),
    "mlp_bias": (True,),
    "use_bias": (True, False),
    "qkv_bias": (True, False),
    "rope_theta": (100.0, 10_000.0),
    "rope_scaling": (
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 32,
        },
        {"rope_type": "no_such_kind"},
    ),
    "head_dim": (4, 8, 16, 32),
    "num_key_value_heads": (1, 2, 4),
    "num_attention_heads": (2, 4, 8),
    "use_qk_norm": (True, False),
    "qk_layernorm": (True, False),
    "attn_logit_softcapping": (None, 2.0),
    "final_logit_softcapping": (None, 5.0),
    "query_pre_attn_scalar": (4, 64),
    "partial_rotary_factor": (0.5, 1.0),
    "rms_norm_eps": (1e-2,),
    "layer_norm_eps": (1e-2,),
    "residual_multiplier": (0.5,),
    "embedding_multiplier": (3.0,),
    "attention_multiplier": (0.3,),
    "logits_scaling": (4.0,),
    "logit_scale": (0.3,),
    "clip_qkv": (None, 0.5),
    "hidden_act": ("silu", "gelu", "relu2"),
    "vocab_size": (61, 128),
    "max_position_embeddings": (64, 128),
    "attention_chunk_size": (8,),
    "is_decoder": (True,),
    "is_causal": (False,),
    "use_bidirectional_attention": (True,),
    "scale_attn_by_inverse_layer_idx": (True,),
    "reorder_and_upcast_attn": (True,),
    "norm_topk_prob": (True, False),
    "num_experts_per_tok": (1, 2),
    "num_kv_shared_layers": (1,),
    "no_rope_layers": ([0, 1], [1, 1]),
    "attention_dropout": (0.3,),
    "use_cache": (False,),
    "pretraining_tp": (2,),
    "parallel_residual": (True, False),
    "use_parallel_residual": (True, False),
    "add_cross_attention": (True,),
}


@dataclass(frozen=True, slots=True)
class RandomCheckpoint:
    """A folder, and the model that it holds; None if `transformers` does not run its settings."""

    about: str
    model: nn.Module | None  # float32, with its own eager attention
    damaged: bool  # it must be refused


def write_random(
    folder: Path, seed: int, kinds: tuple[str, ...] = COMMON_KINDS
) -> RandomCheckpoint:
    """Write the checkpoint of a seed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    while (base := _build(kind := rng.choice(kinds), {})) is None:
        pass
    chosen = rng.sample(sorted(_SETTINGS), rng.choice((0, 0, 1, 1, 2, 4)))
    settings = {key: rng.choice(_SETTINGS[key]) for key in chosen}
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
    damage = rng.choice(sorted(DAMAGES)) if rng.random() < 0.5 else None
    about = f"{seed}: {kind} {settings} {dtype} {damage}"
    built = _build(kind, settings) if settings else base
    _save(built or base, folder, dtype)
    if built is None:
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | settings))
        return RandomCheckpoint(about, None, damaged=True)
    exact: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    exact.set_attn_implementation("eager")
    if damage is not None:
        DAMAGES[damage](folder, rng)
    return RandomCheckpoint(about, exact.eval(), damaged=damage not in (None, *_HARMLESS))


def _build(kind: str, settings: Mapping[str, Any]) -> nn.Module | None:
    """Return a random model; None if `transformers` cannot make or run it."""
    try:
        config_class = CONFIG_MAPPING[kind]
        names = getattr(config_class, "attribute_map", {})
        known = {*config_class().to_dict(), *names}
        sizes = {key: value for key, value in _SIZES.items() if key in known}
        sizes = {k: v for k, v in sizes.items() if names.get(k) not in (sizes | dict(settings))}
        class_name: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        class_name = class_name if isinstance(class_name, str) else class_name[0]
        config = config_class(**{**sizes, **settings})
        with torch.device("meta"):
            model = getattr(transformers, class_name)(config)
        if sum(weight.numel() for weight in model.parameters()) > _LARGEST:
            return None
        model = getattr(transformers, class_name)(config).eval()
        model.set_attn_implementation("eager")
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name or "ln_" in name or weight.dim() < 2:
                    weight.add_(torch.randn_like(weight) * 0.1)
                else:
                    is_embedding = "embed" in name or "wte" in name or "wpe" in name
                    weight.copy_(torch.randn_like(weight) * (0.1 if is_embedding else 0.3))
            logits = model(input_ids=torch.arange(1, 30)[None], use_cache=False).logits
    except Exception:  # each class checks, or does not check, in its own way
        return None
    return model if bool(logits.isfinite().all()) else None


def _save(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    saved: Any = model.to(dtype)
    transformers.utils.logging.disable_progress_bar()
    saved.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # its own tests have it


def _tensors(folder: Path) -> Tensors:
    return load_file(folder / WEIGHTS)


def _write(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _of_tensors(change: Callable[[Tensors, str], object]) -> Damage:
    """Change one tensor of many, a matrix."""

    def damage(folder: Path, rng: random.Random) -> None:
        tensors = _tensors(folder)
        change(tensors, rng.choice(sorted(name for name, t in tensors.items() if t.dim() > 1)))
        _write(folder, tensors)

    return damage


def _of_config(**changes: Any) -> Damage:
    def damage(folder: Path, _: random.Random) -> None:
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | changes))

    return damage


def _of_file(name: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path, _: random.Random) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def _one_layer_more(folder: Path, rng: random.Random) -> None:
    fields = json.loads((folder / "config.json").read_text())
    names = ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers")
    layers = next((name for name in names if name in fields), None)
    if layers is None:
        return DAMAGES["missing tensor"](folder, rng)
    fields[layers] += 1
    for key, value in fields.items():  # one entry per layer
        if isinstance(value, list) and len(value) == fields[layers] - 1:
            fields[key] = [*value, value[-1]]
    (folder / "config.json").write_text(json.dumps(fields))
    return None


def _in_shards(folder: Path) -> list[str]:
    tensors = _tensors(folder)
    (folder / WEIGHTS).unlink()
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {name: files[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in files:
        held = {name: tensors[name] for name in tensors if index[name] == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return files


def _missing_shard(folder: Path, rng: random.Random) -> None:
    (folder / rng.choice(_in_shards(folder))).unlink()


def _wrong_index(folder: Path, rng: random.Random) -> None:
    files = _in_shards(folder)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    name = rng.choice(sorted(index))
    index[name] = next(file for file in files if file != index[name])
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _pickled(folder: Path, _: random.Random) -> None:
    torch.save(_tensors(folder), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def _with_nan(tensors: Tensors, name: str) -> None:
    tensors[name].view(-1)[-1] = torch.nan


def _set(suffix: str, value: Callable[[Tensor], Tensor]) -> Callable[[Tensors, str], object]:
    return lambda tensors, name: tensors.update({name + suffix: value(tensors[name])})


DAMAGES: Mapping[str, Damage] = {
    "missing tensor": _of_tensors(lambda tensors, name: tensors.pop(name)),
    "renamed tensor": _of_tensors(lambda t, name: t.update({f"{name}_": t.pop(name)})),
    "surplus tensor": _of_tensors(_set(".extra", torch.clone)),
    "surplus scale": _of_tensors(_set("_scale", lambda t: torch.ones(len(t)))),
    "misshapen tensor": _of_tensors(_set("", lambda t: t[:-1].contiguous())),
    "turned tensor": _of_tensors(_set("", lambda t: t.flatten().contiguous())),
    "int8 weight": _of_tensors(_set("", lambda t: t.to(torch.int8))),
    "float8 weight": _of_tensors(_set("", lambda t: t.to(torch.float8_e4m3fn))),
    "not a number": _of_tensors(_with_nan),
    "truncated file": _of_file(WEIGHTS, lambda data: data[:-10]),
    "empty file": _of_file(WEIGHTS, lambda _: b""),
    "noise behind the file": _of_file(WEIGHTS, lambda data: data + b"noise"),
    "broken config": _of_file("config.json", lambda data: data[:-3]),
    "no config": lambda folder, _: (folder / "config.json").unlink(),
    "no weights": lambda folder, _: (folder / WEIGHTS).unlink(),
    "missing shard": _missing_shard,
    "wrong index": _wrong_index,
    "pickled": _pickled,
    "one layer more": _one_layer_more,
    "quantised": _of_config(quantization_config={"quant_method": "awq", "bits": 4}),
    "unknown model_type": _of_config(model_type="no_such_type"),
    "bad eos": _of_config(eos_token_id="</s>"),
    # The rest is harmless.
    "in shards": lambda folder, _: _in_shards(folder) and None,
    "other dtype": _of_tensors(_set("", lambda t: t.float())),
    "old buffer": _of_tensors(lambda t, _: t.update({"model.rotary_emb.inv_freq": torch.ones(4)})),
    "prediction module": _of_tensors(lambda t, _: t.update({"mtp.fc.weight": torch.ones(4)})),
    "unknown setting": _of_config(no_such_setting=3),
}
_HARMLESS = ("in shards", "other dtype", "old buffer", "prediction module", "unknown setting")
