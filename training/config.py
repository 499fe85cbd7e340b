"""The target's shape, and the tokenizer's special tokens, which drafts share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD, SYSTEM, USER, ASSISTANT, END)
END_OF_TEXT_ID = 0
PAD_ID = 1
END_ID = 5

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] if message['role'] in ['system', 'user', 'assistant'] else 'user' }}|>\n"
    "{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-architecture model with tied embeddings."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int = 8192
    head_dim: int = 64
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def to_transformers(self) -> dict[str, Any]:
        """Return the `config.json` that `transformers` reads."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rms_norm_eps": self.norm_eps,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": [END_OF_TEXT_ID, END_ID],
            "pad_token_id": PAD_ID,
            "use_cache": True,
            "dtype": "bfloat16",
        }


TARGET = ModelConfig(hidden=768, layers=8, intermediate=2048, heads=12, kv_heads=4)
TINY_TARGET = ModelConfig(hidden=128, layers=2, intermediate=256, heads=2, kv_heads=1)
