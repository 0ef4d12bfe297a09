"""Tiny random checkpoints of models that read images and text, written by transformers itself.

    path = wrapped_checkpoint(tmp_path, "gemma3")

The text model is the tiny one of `tests.checkpoints`; what reads images is as small as its class allows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.checkpoints import OWN, SIZES, fill_randomly

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_QWEN_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                                "out_hidden_size": 64, "patch_size": 4}  # fmt: skip
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}

#: model_type, or that of the text model in Mistral's -> (family of the text model, what its configuration has beside
#: that of the tiny one, what reads images).
WRAPPED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {}, {**_VISION, "image_size": 16, "patch_size": 4}),
    "gemma4": ("gemma4_text", {"pad_token_id": 0}, {
        **_VISION, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 16}),
    "qwen3_5": ("qwen3_5_text", {}, {**_QWEN_VISION, "num_position_embeddings": 16}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}, {**_QWEN_VISION, "num_position_embeddings": 16}),
    "mistral3": ("mistral", {"model_type": "mistral"}, {**_VISION, "image_size": 16, "patch_size": 4, "head_dim": 16}),
    "ministral3": ("mistral", {"model_type": "ministral3", "sliding_window": None, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.5}}, {**_VISION, "image_size": 16, "patch_size": 4, "head_dim": 16}),
    "qwen2_vl": ("qwen2", {"rope_parameters": _MROPE}, {
        "depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4}),
    "qwen2_5_vl": ("qwen2", {"rope_parameters": _MROPE, "tie_word_embeddings": False}, _QWEN_VISION),
    "qwen3_vl": ("qwen3", {"rope_parameters": {**_MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}}, {
        **_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": ("qwen3_moe", {
        "moe_intermediate_size": 40, "rope_parameters": {**_MROPE, "mrope_section": [4, 2, 2]}}, {
        **_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}),
    "kimi_k25": ("deepseek_v3", {"model_type": "deepseek_v3"}, {**_VISION, "patch_size": 4}),
    "glm4v": ("glm4", {"head_dim": 8, "rope_parameters": {
        **_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}}, _QWEN_VISION),
    "llama4": ("llama4_text", {}, {
        **_VISION, "image_size": 16, "patch_size": 4, "projector_input_dim": 32, "projector_output_dim": 32,
        "vision_output_dim": 32}),
    "glm4v_moe": ("glm4_moe", {"rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5}}, _QWEN_VISION),
}  # fmt: skip


def wrapped_model(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 model of transformers in eval mode, the same on every call with the same arguments;
    `overrides` are of its text model."""
    family, own, vision = WRAPPED[name]
    text = SIZES | OWN[family] | own | overrides
    whole = "mistral3" if name == "ministral3" else name
    tied = text["tie_word_embeddings"]
    config = AutoConfig.for_model(whole, text_config=text, vision_config=vision, tie_word_embeddings=tied)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    fill_randomly(model, family, seed)
    return model.eval()


def wrapped_checkpoint(directory: Path, name: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write such a model under `directory`; returns its path."""
    path = directory / f"tiny-{name}"
    wrapped_model(name, seed=seed, **overrides).save_pretrained(path)
    if name == "kimi_k25":  # it saves layers as blocks, which it calls those of the vision tower
        rename(path, lambda tensor: tensor.replace("model.blocks.", "model.layers."))
    return path


def rename(path: Path, named: Callable[[str], str]) -> None:
    """Give the tensors of a checkpoint other names."""
    file = path / "model.safetensors"
    save_file({named(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
