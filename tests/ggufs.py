"""GGUF files of the tiny models, written by gguf-py: names, permutations and quantisation are its own.

path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", {"*ffn_down*": "Q8_0"})
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def write_gguf(model: Any, path: Path, types: Mapping[str, str] | None = None) -> Path:
    """Write a transformers model. `types` maps globs of GGUF names to quantisation types; what none matches, and
    vectors, are F32. There is no tokenizer."""
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    writer = GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        values = tensor.float().numpy()
        if arch == "llama" and ".q_proj." in name:
            values = interleaved(values, heads)
        if arch == "llama" and ".k_proj." in name:
            values = interleaved(values, kv_heads)
        kind = next((kind for glob, kind in (types or {}).items() if fnmatchcase(theirs, glob)), "F32")
        _add(writer, theirs, values, GGMLQuantizationType[kind if values.ndim > 1 else "F32"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as GGUF's llama has them."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _add(writer: GGUFWriter, name: str, values: np.ndarray, kind: GGMLQuantizationType) -> None:
    if kind == GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    else:
        data = quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
