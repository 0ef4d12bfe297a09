"""`ModelConfig` from GGUF metadata: what llama.cpp reads, and refusals by key."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lockstep.engine.checkpoint.gguf.source import open_gguf
from lockstep.engine.config import ModelConfig
from lockstep.engine.config.rope_scaling import RopeScaling
from lockstep.engine.errors import ConfigError
from lockstep.engine.rules.rope import frequencies
from tests.checkpoints import VARIANTS, tiny_config, tiny_variant
from tests.gguf_twins import gguf_twin

LLAMA: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.vocab_size": 10,
}


def _model(
    path: Path, changes: dict[str, Any] | None = None, *, architecture: str = "llama", factors: Any = None
) -> ModelConfig:
    """Of a file with these keys (None: left out) and hardly a tensor."""
    file = path / "model.gguf"
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in (LLAMA | (changes or {})).items():
        key = key.replace("llama.", f"{architecture}.", 1)
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            kinds = {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
            }
            kinds[type(value)](key, value)
    writer.add_tensor("token_embd.weight", np.zeros((10, 32), np.float16))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(file)[0]


def test_what_is_absent_is_what_llama_cpp_assumes(tmp_path: Path) -> None:
    model = _model(tmp_path)
    assert (model.num_kv_heads, model.head_dim, model.rope_theta) == (4, 8, 10_000.0)
    assert (model.rope_scaling, model.windows, model.dtype) == (RopeScaling(), (None,), "float16")
    assert (model.tie_embeddings, model.qkv_bias, model.bos_id, model.eos_ids) == (True, False, None, ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.attention.head_count": None}, "llama: attention.head_count is missing"),
        ({"llama.attention.head_count": 0}, "attention.head_count is 0: expected a whole number from 1"),
        ({"llama.attention.head_count": "four"}, "attention.head_count is 'four'"),
        (
            {"llama.attention.head_count": 5},
            "embedding_length is 32: attention.head_count = 5 does not divide it",
        ),
        ({"llama.attention.head_count_kv": 3}, "attention.head_count_kv is 3: does not divide"),
        ({"llama.attention.head_count_kv": [4, 2]}, "attention.head_count_kv differs from layer to layer"),
        ({"llama.attention.key_length": 7}, "heads are 7 wide: odd"),
        ({"llama.attention.value_length": 16}, "attention.value_length is 16: heads are 8 wide"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4: heads are 8 wide"),
        ({"llama.block_count": 20_000}, "block_count is 20000"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon is 0.0"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
        ({"llama.expert_count": 8}, r"no layer has a router \(ffn_gate_inp.weight\)"),
        ({"llama.attention.causal": False}, "attention.causal is False: not supported"),
        ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0: not supported"),
        (
            {"llama.rope.scaling.type": "longrope"},
            "rope.scaling.type is 'longrope': not supported; supported are",
        ),
        ({"llama.rope.scaling.factor": -2.0}, "rope.scaling.factor is -2.0"),
        (
            {"tokenizer.ggml.tokens": ["a"] * 10, "tokenizer.ggml.eos_token_id": 10},
            "the vocabulary has 10 tokens",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_key(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        _model(tmp_path, changes)
    assert "model.gguf" in str(caught.value)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="'mamba': not a supported architecture; supported are qwen2, qwen3, llama"
    ):
        _model(tmp_path, architecture="mamba")
    with pytest.raises(ConfigError, match=r"qwen2: attention.sliding_window is 8: not supported"):
        _model(tmp_path, {"llama.attention.sliding_window": 8}, architecture="qwen2")


def test_a_window_on_llama_is_mistral(tmp_path: Path) -> None:
    model = _model(tmp_path, {"llama.attention.sliding_window": 8})
    assert (model.family, model.windows) == ("mistral", (8,))
    assert _model(tmp_path, {"llama.attention.sliding_window": 64}).windows == (None,)


@pytest.mark.parametrize("scaling", ["linear", "llama3", "yarn"])
def test_scaled_frequencies_are_those_of_transformers(scaling: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[f"llama-{scaling}"]
    model = open_gguf(gguf_twin(tiny_variant(tmp_path, f"llama-{scaling}"), tmp_path / "twin.gguf"))[0]
    found, factor = frequencies(model, model.rope_theta)
    theirs, their_factor = ROPE_INIT_FUNCTIONS[scaling](tiny_config(family, **overrides), torch.device("cpu"))
    torch.testing.assert_close(found, theirs, rtol=2e-7, atol=0)
    assert factor == pytest.approx(their_factor, rel=1e-7)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (np.ones(3, np.float32), r"rope_freqs.weight is F32 \[3\], expected F32 \[4\]"),
        (np.ones(4, np.float16), r"rope_freqs.weight is F16 \[4\]"),
        (np.zeros(4, np.float32), "a factor that is not finite and above 0"),
    ],
)
def test_frequency_factors_must_make_sense(factors: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        _model(tmp_path, factors=factors)


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    tokens = ["<s>", "</s>", "<|im_end|>", *map(str, range(6)), "<|endoftext|>"]
    keys = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.bos_token_id": 0,
    }
    model = _model(tmp_path, keys | {"llama.vocab_size": 99})
    assert (model.bos_id, model.eos_ids, model.vocab_size) == (0, (1, 2, 9), 10)
    none = {"tokenizer.ggml.eos_token_id": struct.unpack("<I", b"\xff" * 4)[0]}
    assert _model(tmp_path, none).eos_ids == ()
