"""A Hugging Face checkpoint as a GGUF file, as llama.cpp's converter makes it, through gguf-py: names by its own
table, q and k of `llama` permuted by the converter's formula. Nothing here comes from the engine.

    path = gguf_twin(tiny_variant(tmp_path, "llama-llama3"), tmp_path / "twin.gguf", "Q8_0")
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def gguf_twin(
    checkpoint: Path,
    path: Path,
    kind: str = "F32",
    *,
    keys: Mapping[str, Any] | None = None,
    split_tensors: int = 0,
) -> Path:
    """Write the twin: matrices of type `kind`, vectors F32. `keys` are further metadata (lists, str, int, bool);
    `split_tensors` is how many tensors a file has at most (then `path` is the name without its number)."""
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=split_tensors)
    _hyperparameters(writer, config)
    for key, value in (keys or {}).items():
        _add(writer, key, value)
    if (factors := _llama3_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        if architecture is gguf.MODEL_ARCH.LLAMA and ".q_proj." in name:
            tensor = _permuted(tensor, config["num_attention_heads"])
        if architecture is gguf.MODEL_ARCH.LLAMA and ".k_proj." in name:
            tensor = _permuted(tensor, config["num_key_value_heads"])
        array = tensor.float().contiguous().numpy()
        stored = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        writer.add_tensor(target, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_keys(checkpoint: Path, pre: str = "qwen2") -> dict[str, Any]:
    """The byte-level BPE tokenizer of a checkpoint as GGUF metadata: what the converter writes."""
    if (checkpoint / "tokenizer.json").is_file():
        described = json.loads((checkpoint / "tokenizer.json").read_text())
        ids, merges = described["model"]["vocab"], described["model"]["merges"]
        added = {token["id"]: token for token in described["added_tokens"]}
    else:
        ids = json.loads((checkpoint / "vocab.json").read_text())
        merges = [line.split(" ") for line in (checkpoint / "merges.txt").read_text().splitlines()[1:]]
        settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
        added = {int(number): token for number, token in settings["added_tokens_decoder"].items()}
    texts = {number: text for text, number in ids.items()} | {
        n: token["content"] for n, token in added.items()
    }
    kinds = {n: 3 if token["special"] else 4 for n, token in added.items()}
    size = max(texts) + 1
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    named = {text: number for number, text in texts.items()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(n, f"[PAD{n}]") for n in range(size)],
        "tokenizer.ggml.token_type": [kinds.get(n, 1 if n in texts else 5) for n in range(size)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": named[settings["eos_token"]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": settings["chat_template"],
    }


def write_keys(path: Path, keys: Mapping[str, Any], architecture: str = "qwen2") -> Path:
    """A GGUF file of metadata alone."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        _add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _hyperparameters(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "mistral" and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _llama3_factors(config: dict[str, Any]) -> np.ndarray | None:
    """`rope_freqs.weight`: what the converter makes of Llama 3.1's scaling."""
    rope = config["rope_parameters"]
    if rope["rope_type"] != "llama3":
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    context, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        smooth = (context / wavelength - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def _permuted(weights: torch.Tensor, heads: int) -> torch.Tensor:
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)
