"""The frozen settings of each drafting method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from outrider.drafting.copying.suffix_settings import SuffixSettings
from outrider.drafting.proposer import TREE_WIDTH
from outrider.errors import ConfigError
from outrider.methods import HIDDEN_STATE_METHODS
from outrider.models.resolve import EMBEDDED, EMBEDDED_HEADS
from outrider.params import MAX_SPECULATIVE_TOKENS

Say = Callable[[str], None]
"""Takes a line about the progress of building."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodConfig:
    """The settings of every method. Raises `ConfigError`."""

    name: str
    max_draft_tokens: int = 16
    """Per round."""
    max_branches: int = 16
    """Most outcomes of a verification that are drafted for ahead, per session; 0: none."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_draft_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(f"--max-draft-tokens is 1 to {MAX_SPECULATIVE_TOKENS}.")
        if self.max_branches < 0:
            raise ConfigError("--max-branches is at least 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig(MethodConfig):
    """Prompt lookup."""

    name: str = "ngram"
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    prefer: Literal["recent", "frequent"] = "recent"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixConfig(MethodConfig):
    """SuffixDecoding."""

    name: str = "suffix"
    max_draft_tokens: int = 24
    settings: SuffixSettings = field(default_factory=SuffixSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeterministicConfig(MethodConfig):
    """Copying from the advice of a request."""

    name: str = "deterministic"
    max_draft_tokens: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(MethodConfig):
    """A method with weights."""

    model: str = EMBEDDED
    """"embedded", a folder, or a Hugging Face id."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """None: bfloat16 on CUDA, and on CPUs with AVX-512 for modules that read hidden states; else
    float32."""
    threads: int = 1
    """CPU threads of torch."""
    kv_cache_memory: int = 256
    """MiB for keys and values."""
    max_model_len: int | None = None
    """None: the model's own."""
    device: Literal["cpu", "cuda"] = "cpu"
    attention_backend: str | None = None
    """None: the best that fits."""
    quantization: Literal["int8", "none"] | None = None
    """None: int8 where there are kernels for it, which is on CUDA in bfloat16."""

    def __post_init__(self) -> None:
        MethodConfig.__post_init__(self)
        if self.threads < 1 or self.kv_cache_memory < 1:
            raise ConfigError("--threads and --kv-cache-memory are at least 1.")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError("--max-model-len is at least 2.")
        if self.quantization == "int8" and not self._has_int8_kernels:
            raise ConfigError("--quantization int8 is for --device cuda and --dtype bfloat16.")

    @property
    def int8_weights(self) -> bool:
        """Weights are read as int8 where that is faster."""
        return self.quantization != "none" and self._has_int8_kernels

    @property
    def _has_int8_kernels(self) -> bool:
        return self.device == "cuda" and self.dtype != "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig(ModelConfig):
    """An independent small language model."""

    name: str = "draft_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig(ModelConfig):
    """A module that reads the target's hidden states. Raises `ConfigError`."""

    target_model: str = EMBEDDED
    """The model that the module was trained for, whose embedding and head it shares."""
    tree_width: int = TREE_WIDTH
    """1: drafts are chains."""
    project_features: bool | None = None
    """eagle3: let the scorer apply the module's first product. None: on CUDA."""

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if self.name not in HIDDEN_STATE_METHODS:
            known = ", ".join(HIDDEN_STATE_METHODS)
            raise ConfigError(f"{self.name} reads no hidden states of the target; {known} do.")
        if self.model == EMBEDDED and not (
            self.target_model == EMBEDDED and self.name in EMBEDDED_HEADS
        ):
            raise ConfigError(
                f"--method {self.name} needs --model: the folder or the Hugging Face id of its "
                "checkpoint."
            )
        if self.tree_width < 1:
            raise ConfigError("--tree-width is at least 1.")
        if self.project_features and self.name != "eagle3":
            raise ConfigError("--project-features is for --method eagle3 alone.")

    @property
    def projects_features(self) -> bool:
        """The scorer is asked to project features, where the module allows it."""
        asked = self.project_features
        return self.name == "eagle3" and (self.device == "cuda" if asked is None else asked)


CONFIGS: Final[Mapping[str, type[MethodConfig]]] = {
    "ngram": NgramConfig,
    "suffix": SuffixConfig,
    "deterministic": DeterministicConfig,
    "draft_model": DraftModelConfig,
    **dict.fromkeys(HIDDEN_STATE_METHODS, HeadConfig),
}
"""By method."""


def check_methods(methods: tuple[MethodConfig, ...]) -> None:
    """Check the methods of one proposer. Raises `ConfigError`."""
    names = [method.name for method in methods]
    if not names or len(set(names)) < len(names):
        raise ConfigError("--method names one method, or several different ones.")
    models = [method.name for method in methods if isinstance(method, ModelConfig)]
    if len(models) > 1:
        raise ConfigError(
            f"--method {','.join(models)}: --model can name only one model. Start a proposer "
            "for each."
        )


def device_of(methods: tuple[MethodConfig, ...]) -> str:
    """Return the device of the methods' model, or else "cpu"."""
    return next((each.device for each in methods if isinstance(each, ModelConfig)), "cpu")
