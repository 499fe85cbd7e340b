"""The frozen settings of each drafting method, from which its flags are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from outrider.aux_layers import LAYER_METHODS
from outrider.drafting.copying.suffix_settings import SuffixSettings
from outrider.drafting.proposer import TREE_WIDTH
from outrider.errors import ConfigError
from outrider.methods import HIDDEN_STATE_METHODS
from outrider.models.local_files import check_draft_model, check_module
from outrider.models.resolve import EMBEDDED, EMBEDDED_HEADS
from outrider.params import MAX_SPECULATIVE_TOKENS
from outrider.settings import setting

Say = Callable[[str], None]
"""Takes a line about the progress of building."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodConfig:
    """The settings of every method. Raises `ConfigError`."""

    name: str
    max_draft_tokens: int = setting(
        16,
        "draft tokens per round at most; unset: 16 for models (5 beside other methods) and "
        "ngram, 24 for suffix, 128 for deterministic",
        unset=True,
    )
    max_branches: int = setting(
        16,
        "outcomes of a verification drafted for ahead of it, per session at most; 0: none; "
        "unset: 16, but none for a draft model on CPU, where that costs more than it hides",
        unset=True,
    )

    def __post_init__(self) -> None:
        if not 1 <= self.max_draft_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(f"--max-draft-tokens is 1 to {MAX_SPECULATIVE_TOKENS}.")
        if self.max_branches < 0:
            raise ConfigError("--max-branches is at least 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig(MethodConfig):
    """Prompt lookup. Raises `ConfigError`."""

    name: str = "ngram"
    prompt_lookup_min: int = setting(2, "ngram")
    prompt_lookup_max: int = setting(4, "ngram")

    def __post_init__(self) -> None:
        MethodConfig.__post_init__(self)
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                "--prompt-lookup-min must be at least 1, at most --prompt-lookup-max."
            )


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

    model: str = setting(
        EMBEDDED,
        "draft_model: embedded, a folder, Hugging Face id; for methods that read hidden states "
        "their checkpoint, likewise; unset: embedded",
        unset=True,
    )
    dtype: Literal["float32", "bfloat16"] | None = setting(
        None,
        "of a model; unset: bfloat16 on CUDA, and on CPUs with AVX-512 for one that reads hidden "
        "states; else float32",
        choices=("float32", "bfloat16"),
    )
    threads: int = setting(1, "of a model: CPU threads")
    kv_cache_memory: int = setting(
        256, "of a model: MiB; unset: 256 on a CPU, 4096 on CUDA", unset=True
    )
    max_model_len: int | None = setting(
        None, "of a model: longest context drafted for; unset: its own", type=int
    )
    device: Literal["cpu", "cuda"] = setting("cpu", "of a model", choices=("cpu", "cuda"))
    attention_backend: str | None = setting(
        None, "of a model: flash, triton, numba or sdpa; unset: the best that fits"
    )
    quantization: Literal["int8", "fp8", "none"] | None = setting(
        None,
        "of a model's weights; unset: int8 on CUDA in bfloat16, beside the weights as they are, "
        "for products of few rows that it makes faster; and on CPUs with AVX-512 VNNI for methods "
        "that read hidden states, unless --dtype float32; fp8: a draft_model on CUDA keeps no "
        "others, which is faster from some 100 rows on",
        choices=("int8", "fp8", "none"),
    )

    def __post_init__(self) -> None:
        MethodConfig.__post_init__(self)
        if self.threads < 1 or self.kv_cache_memory < 1:
            raise ConfigError("--threads and --kv-cache-memory are at least 1.")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError("--max-model-len is at least 2.")
        if self.quantization == "int8" and not self._has_int8_kernels:
            raise ConfigError(
                "--quantization int8 is for --dtype bfloat16, and on a CPU for methods that read "
                "hidden states."
            )
        if self.quantization == "fp8" and not self._has_fp8_kernels:
            raise ConfigError(
                "--quantization fp8 is for --method draft_model on CUDA in bfloat16: int8 and none "
                "are for all others."
            )

    @property
    def int8_weights(self) -> bool:
        """Weights are read as int8 where that is faster."""
        return self.quantization != "none" and self._has_int8_kernels

    @property
    def _has_int8_kernels(self) -> bool:
        return self.device == "cuda" and self.dtype != "float32"

    @property
    def _has_fp8_kernels(self) -> bool:
        return self._has_int8_kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig(ModelConfig):
    """An independent small language model."""

    name: str = "draft_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig(ModelConfig):
    """A module that reads the target's hidden states. Raises `ConfigError`."""

    target_model: str = setting(
        EMBEDDED, "methods that read hidden states: the model that the scorer serves"
    )
    tree_width: int = setting(
        TREE_WIDTH,
        "methods that read hidden states: children of a node of the draft tree that are looked at, "
        "and nodes of a depth that may get some; 1: drafts are chains",
    )
    project_features: bool | None = setting(
        None,
        "methods that read layers: let the scorer apply the module's first product, so that it "
        "sends one state per token instead of several; unset: on CUDA",
        type=bool,
    )

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if self.name not in HIDDEN_STATE_METHODS:
            known = ", ".join(HIDDEN_STATE_METHODS)
            raise ConfigError(f"{self.name} reads no hidden states of the target; {known} do.")
        if self.model == EMBEDDED and not (
            self.target_model == EMBEDDED and self.name in EMBEDDED_HEADS
        ):
            brought = ", ".join(sorted(EMBEDDED_HEADS))
            raise ConfigError(
                f"--method {self.name} needs --model: the folder or the Hugging Face id of its "
                f"checkpoint. Only the embedded model brings {brought}."
            )
        if self.tree_width < 1:
            raise ConfigError("--tree-width is at least 1.")
        if self.project_features and self.name not in LAYER_METHODS:
            known = ", ".join(sorted(LAYER_METHODS))
            raise ConfigError(f"--project-features is for methods that read layers: {known}.")

    @property
    def _has_int8_kernels(self) -> bool:
        return self.dtype != "float32"

    @property
    def _has_fp8_kernels(self) -> bool:
        return False

    @property
    def projects_features(self) -> bool:
        """The scorer is asked to project features, where the module allows it."""
        asked = self.project_features
        return self.name in LAYER_METHODS and (self.device == "cuda" if asked is None else asked)


CONFIGS: Final[Mapping[str, type[MethodConfig]]] = {
    "draft_model": DraftModelConfig,
    **dict.fromkeys(HIDDEN_STATE_METHODS, HeadConfig),
    "ngram": NgramConfig,
    "suffix": SuffixConfig,
    "deterministic": DeterministicConfig,
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


def check_files(methods: tuple[MethodConfig, ...]) -> None:
    """Refuse models on this machine by their files, without torch. Raises `ConfigError`."""
    for method in methods:
        if isinstance(method, HeadConfig):
            check_module(method.model, method.name, method.target_model)
        elif isinstance(method, ModelConfig):
            check_draft_model(method.model)


def device_of(methods: tuple[MethodConfig, ...]) -> str:
    """Return the device of the methods' model, or else "cpu"."""
    return next((each.device for each in methods if isinstance(each, ModelConfig)), "cpu")
