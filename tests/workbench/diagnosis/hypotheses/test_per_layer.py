"""What Gemma-4 has of its own, in a model of transformers: faultless, and with what other engines may get wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import tiny_checkpoint
from tests.workbench.diagnosis.attached import attached_and_diagnosed


def _of_writers(model: Any, change: Callable[[Any], None]) -> None:
    for layer in model.model.layers:
        if not layer.self_attn.is_kv_shared_layer:
            change(layer.self_attn)


def values_not_normalised(model: Any) -> None:
    _of_writers(model, lambda attention: setattr(attention.v_norm, "forward", lambda x: x))


def values_by_norm_of_keys(model: Any) -> None:
    _of_writers(model, lambda attention: setattr(attention.v_norm, "forward", attention.k_norm.forward))


def without_scalars(model: Any) -> None:
    for layer in model.model.layers:
        layer.layer_scalar.fill_(1.0)


def whole_heads_rotated(model: Any) -> None:
    frequencies = model.model.rotary_emb.full_attention_inv_freq
    dim = 2 * len(frequencies)
    frequencies.copy_(1e6 ** -(2 * frequencies.new_tensor(range(dim // 2)) / dim))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (values_not_normalised, "values are not normalised"),
        (values_by_norm_of_keys, "values go through the norm of keys"),
        (without_scalars, "not multiplied by its scalar"),
        (whole_heads_rotated, ""),
    ],
)
def test_a_cause_is_named(change: Callable[[Any], None], words: str, tmp_path: Path) -> None:
    found = attached_and_diagnosed(tiny_checkpoint(tmp_path, "gemma4_text"), tmp_path, "float32", change)
    assert words in found.causes[0].text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_faultless_model_is_judged_whole(dtype: str, tmp_path: Path) -> None:
    found = attached_and_diagnosed(tiny_checkpoint(tmp_path, "gemma4_text"), tmp_path, dtype)
    assert not found.causes
    assert not found.wrong
    assert not found.unjudged
