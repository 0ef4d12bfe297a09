"""Keys of config.json that nobody reads: none of a usual configuration, each that a stranger has put in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.workbench.diagnosis.loaded.config_keys import unread_keys, unread_words
from tests.checkpoints import tiny_checkpoint


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "deepseek_v3", "qwen3_next", "gpt_oss"])
def test_a_usual_configuration_is_read_whole(family: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, family)
    assert unread_keys(json.loads((checkpoint / "config.json").read_text())) == {}
    assert unread_words(checkpoint) == ()


#: As the file of Qwen2.5-0.5B has them.
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
    "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({}, {}),
        ({"residual_scale": 0.22}, {"residual_scale": 0.22}),
        ({"residual_scale": None, "qk_clip": False, "_note": "x"}, {}),
        ({"attention_multiplier": 0.5, "initializer_range": 0.1}, {"attention_multiplier": 0.5}),
    ],
)
def test_what_says_something_and_is_read_by_nobody_is_found(
    more: dict[str, Any], found: dict[str, Any]
) -> None:
    assert unread_keys(QWEN | more) == found


def test_it_is_reported_with_its_value(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"logit_scale": 0.0625}))
    (reported,) = unread_words(tmp_path)
    assert reported.endswith("not what the family has by itself: logit_scale = 0.0625")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    assert unread_words(tmp_path) == ()
