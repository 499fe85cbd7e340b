"""Read from a checkpoint's files how it is to be served. Knows nothing of torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from outrider.models.files import read_json
from outrider.models.weight_files import read_headers, read_index

MTP_TENSORS: Final = {
    "DeepSeek": r"model\.layers\.(\d+)\.(?:enorm|hnorm|shared_head\.norm)\.weight",
    "Qwen": r"mtp\.layers\.(\d+)\..+",
    "RTP-LLM": r"model\.layers\.(\d+)\.(?:e_norm|h_norm|final_head\.norm)\.weight",
}
"""Format of a multi-token prediction module -> names that only its tensors have."""
_MTP_TARGETS: Final = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), "DeepSeek"),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text"), "Qwen"),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), "Qwen"),
}
"""model_type of targets that bring such a module -> its format."""
_HEADS: Final = ("dspark", "dflash", "peagle", "eagle3", "eagle", "medusa", "mlp_speculator", "mtp")
"""Methods whose checkpoints are known by their config.json or name; more special ones first."""


def stored_dtype(folder: Path) -> str:
    """Return the dtype that a target's config.json names, such as bfloat16, else float32."""
    config = read_json(folder / "config.json")
    for fields in (config, config.get("text_config")):
        if isinstance(fields, dict):
            named = fields.get("dtype", fields.get("torch_dtype"))
            if isinstance(named, str):
                return named.removeprefix("torch.")
    return "float32"


def brings_mtp(folder: Path) -> bool:
    """Return whether a target's checkpoint holds a prediction module that can draft for it."""
    kind = _MTP_TARGETS.get(str(read_json(folder / "config.json").get("model_type")))
    if kind is None:
        return False
    names = read_index(folder) or read_headers(
        folder, [p.name for p in folder.glob("*.safetensors")]
    )
    return any(re.fullmatch(MTP_TENSORS[kind], name) for name in names)


def drafting_method(name: str, folder: Path | None) -> str:
    """Return the method that a draft's checkpoint is made for, by its config.json and its name.

    `folder` is None if the checkpoint is not on this machine.
    """
    config: dict[str, Any] = {} if folder is None else read_json(folder / "config.json")
    said = " ".join(
        str(config.get(key, ""))
        for key in ("architectures", "model_type", "speculators_model_type")
    )
    text = f"{said} {Path(name).name}".lower().replace("mlpspeculator", "mlp_speculator")
    if "medusa_num_heads" in config:
        return "medusa"
    if "accelerator" in text:  # as ibm-fms names them
        return "mlp_speculator"
    return next((method for method in _HEADS if method in text), "draft_model")
