"""The checkpoints that the bugs run on: random tiny models, wide enough for the heads that vLLM's CPU kernels take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import FAMILY_VARIANTS, tiny_checkpoint
from tests.gguf_twins import CONVERTIBLE

_WIDE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 132,
}  # fmt: skip
_HEADS = _WIDE | {"head_dim": 32}
_EXPERTS = {"moe_intermediate_size": 64}
_SCALED = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

#: name -> (family, overrides).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", _WIDE),
    "qwen3": ("qwen3", _HEADS),
    "llama": ("llama", _WIDE),
    "llama-gqa": ("llama", _WIDE | {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "llama-theta": ("llama", _WIDE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "llama-llama3": ("llama", _WIDE | {"rope_parameters": _LLAMA3}),
    "llama-dynamic": ("llama", _WIDE | {"max_position_embeddings": 32, "rope_parameters": _SCALED}),
    "gemma2": ("gemma2", _HEADS),
    "gemma2-gguf": ("gemma2", _HEADS | {"query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3_text", _HEADS),
    "glm4": ("glm4", _HEADS),
    "olmo2": ("olmo2", _WIDE),
    "starcoder2": ("starcoder2", _WIDE | {"sliding_window": None}),
    "olmoe": ("olmoe", _WIDE | {"intermediate_size": 64}),
    "qwen3-moe": ("qwen3_moe", _HEADS | _EXPERTS),
    "glm4-moe": ("glm4_moe", _HEADS | _EXPERTS),
    "qwen2-moe": ("qwen2_moe", {}),
    "gpt-oss": ("gpt_oss", {}),
    "smollm3": ("smollm3", {}),
    "deepseek-v2-yarn": FAMILY_VARIANTS["deepseek-v2-lite"],
    "deepseek-v3": ("deepseek_v3", {}),
    "deepseek-v3-below": ("deepseek_v3", {}),
    "deepseek-v3-gguf": CONVERTIBLE["deepseek-v3"],
    "glm4-moe-lite": ("glm4_moe_lite", {}),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5-gguf": CONVERTIBLE["qwen3.5"],
    "glm4-gguf": CONVERTIBLE["glm4"],
    "qwen2-odd": ("qwen2", _WIDE | {"vocab_size": 131}),
    "qwen2-unused-window": ("qwen2", _WIDE),
    "gemma4": ("gemma4_text", {}),
    "lfm2": ("lfm2", {}),
    "llama4": ("llama4_text", {}),
    "phi3-longrope": CONVERTIBLE["phi3-longrope"],
}

#: Correction biases as training leaves them: all far above the scores that they correct, or below them.
_BIASES = {"glm4-moe": 4.0, "deepseek-v3-below": -2.0}


def checkpoint(directory: Path, name: str, dtype: str = "float32") -> Path:
    """The model `name` in `directory`, made once; `dtype` as of its config."""
    path = directory / f"{name}-{dtype}"
    if not (path / "config.json").is_file():
        family, overrides = MODELS[name]
        made = tiny_checkpoint(directory / "made", family, dtype=getattr(torch, dtype), **overrides)
        if name in _BIASES:
            _with_biases(made, around=_BIASES[name])
        if name == "qwen2-unused-window":
            _with_config(made, sliding_window=8, use_sliding_window=False)
        made.rename(path)
    return path


def _with_config(path: Path, **fields: Any) -> None:
    """Fields of the config as they are published, which transformers' own class does not write."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields, indent=2))


def _with_biases(path: Path, around: float) -> None:
    """Correction biases around a value, in float32."""
    file = path / "model.safetensors"
    weights = load_file(file)
    for name in [one for one in weights if one.endswith("e_score_correction_bias")]:
        generator = torch.Generator().manual_seed(len(name))
        weights[name] = around + 0.2 * torch.randn(weights[name].shape, generator=generator)
    save_file(weights, file, {"format": "pt"})
