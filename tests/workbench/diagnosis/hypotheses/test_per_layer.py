"""What Gemma-4 has of its own, in a model of transformers: faultless, and with what other engines may get wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import FAMILY_VARIANTS, tiny_checkpoint
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


def _of_routers(model: Any, change: Callable[[Any], None]) -> None:
    for layer in model.model.layers:
        change(layer.router)


def router_not_normalised(model: Any) -> None:
    _of_routers(model, lambda router: setattr(router.norm, "forward", lambda x: x))


def router_by_norm_of_mlp(model: Any) -> None:
    for layer in model.model.layers:
        layer.router.norm.forward = layer.pre_feedforward_layernorm.forward


def router_without_scale(model: Any) -> None:
    _of_routers(model, lambda router: router.scale.data.fill_(1.0))


def router_without_factor(model: Any) -> None:
    _of_routers(model, lambda router: setattr(router, "scalar_root_size", 1.0))


def weights_without_scale(model: Any) -> None:
    _of_routers(model, lambda router: router.per_expert_scale.data.fill_(1.0))


def experts_read_as_the_mlp(model: Any) -> None:
    for layer in model.model.layers:
        layer.pre_feedforward_layernorm_2.forward = layer.pre_feedforward_layernorm.forward


def norms_exchanged(model: Any) -> None:
    for layer in model.model.layers:
        one, other = layer.post_feedforward_layernorm_1, layer.post_feedforward_layernorm_2
        one.forward, other.forward = other.forward, one.forward


def experts_left_out(model: Any) -> None:
    for layer in model.model.layers:
        layer.post_feedforward_layernorm_2.forward = lambda x: x * 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (router_not_normalised, "its own norm is left out"),
        pytest.param(router_by_norm_of_mlp, "through the MLP's norm", marks=pytest.mark.slow),
        (router_without_scale, "not multiplied by its scale"),
        pytest.param(router_without_factor, "root of the width", marks=pytest.mark.slow),
        pytest.param(weights_without_scale, "number of each expert", marks=pytest.mark.slow),
        pytest.param(experts_read_as_the_mlp, "the output of the MLP's norm goes on", marks=pytest.mark.slow),
        pytest.param(norms_exchanged, "post_feedforward_layernorm", marks=pytest.mark.slow),
        pytest.param(experts_left_out, "multiplied by 0", marks=pytest.mark.slow),
    ],
)
def test_a_cause_where_experts_stand_beside_an_mlp_is_named(
    change: Callable[[Any], None], words: str, tmp_path: Path
) -> None:
    family, overrides = FAMILY_VARIANTS["gemma4-moe"]
    found = attached_and_diagnosed(
        tiny_checkpoint(tmp_path, family, **overrides), tmp_path, "float32", change
    )
    assert words in found.causes[0].text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma4", "gemma4-moe"])
def test_a_faultless_model_is_judged_whole(name: str, dtype: str, tmp_path: Path) -> None:
    family, overrides = FAMILY_VARIANTS[name]
    found = attached_and_diagnosed(tiny_checkpoint(tmp_path, family, **overrides), tmp_path, dtype)
    assert not found.causes
    assert not found.wrong
    assert not found.unjudged
