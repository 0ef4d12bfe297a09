"""Rotary embedding against transformers' own initialisation and application, and against its definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3 import modeling_phi3

from lockstep.engine.config import ModelConfig
from lockstep.engine.rules.rope import cos_sin, frequencies, in_heads_of, rotate_half_split
from tests.checkpoints import tiny_config

pytestmark = pytest.mark.sampled_file(2)

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
}


def configs(kind: str, **changes: Any) -> tuple[Any, ModelConfig]:
    """A transformers config with that scaling, and what the engine reads from it."""
    rope = {"rope_type": kind, "rope_theta": 1e4} | SCALINGS.get(kind, {}) | changes
    config = tiny_config("llama", rope_parameters=rope, head_dim=32, max_position_embeddings=512)
    return config, ModelConfig.from_hf(config.to_dict())


def check(config: Any, model: ModelConfig) -> None:
    """Frequencies and attention factor are transformers'."""
    kind = model.rope_scaling.kind
    if kind == "none":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    found, found_factor = frequencies(model, model.rope_theta)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert found_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.sampled(2)
@given(
    theta=st.sampled_from([1e4, 5e5, 1e6, 1234.5]),
    factor=st.floats(1.0, 64.0),
    original=st.sampled_from([16, 64, 100, 512]),
    low=st.floats(0.5, 2.0),
    spread=st.floats(0.5, 6.0),
)
@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_frequencies_are_transformers(
    kind: str, theta: float, factor: float, original: int, low: float, spread: float
) -> None:
    changes: dict[str, Any] = {"rope_theta": theta}
    if kind != "default":
        changes["factor"] = factor
    if kind == "llama3":
        changes |= {"low_freq_factor": low, "high_freq_factor": low + spread}
        changes["original_max_position_embeddings"] = original
    check(*configs(kind, **changes))


@given(
    factor=st.floats(1.0, 64.0),
    original=st.sampled_from([16, 64, 100, 512]),
    betas=st.tuples(st.floats(8.0, 64.0), st.floats(0.5, 4.0)),
    extra=st.sampled_from(
        [{}, {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.1}, {"truncate": False}]
    ),
)
def test_yarn_is_transformers(
    factor: float, original: int, betas: tuple[float, float], extra: dict[str, Any]
) -> None:
    changes = {"factor": factor, "original_max_position_embeddings": original}
    check(*configs("yarn", **changes, beta_fast=betas[0], beta_slow=betas[1], **extra))


@given(factor=st.floats(1.0, 64.0), length=st.integers(1, 5000))
def test_dynamic_scaling_is_transformers(factor: float, length: int) -> None:
    config, model = configs("dynamic", factor=factor)
    expected, expected_factor = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=length)
    found, found_factor = frequencies(model, model.rope_theta, length)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert found_factor == expected_factor


@given(
    factors=st.lists(st.floats(0.5, 64.0), min_size=32, max_size=32),
    original=st.sampled_from([16, 100, 512]),
    length=st.integers(1, 600),
    extra=st.sampled_from([{}, {"attention_factor": 1.3}, {"factor": 8.0}]),
)
def test_longrope_is_transformers(
    factors: list[float], original: int, length: int, extra: dict[str, Any]
) -> None:
    changes = {
        "short_factor": factors[:16],
        "long_factor": factors[16:],
        "original_max_position_embeddings": original,
    }
    config, model = configs("longrope", **changes, **extra)
    expected, expected_factor = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=length)
    found, found_factor = frequencies(model, model.rope_theta, length)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert found_factor == pytest.approx(expected_factor, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SCALINGS)
def test_rotation_is_transformers(kind: str, dtype: torch.dtype) -> None:
    """Far positions as well, which collide when they are held in bfloat16."""
    config, model = configs(kind)
    positions = torch.tensor([0, 1, 7, 300, 301, 302, 511])
    x = torch.randn(2, len(positions), 4, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    expected = apply_rotary_pos_emb(x[0][None].transpose(1, 2), x[1][None].transpose(1, 2), cos, sin)
    inv_freq, factor = frequencies(model, model.rope_theta)
    angles = cos_sin(positions, inv_freq, factor, dtype)
    for ours, theirs in zip(x, expected, strict=True):
        assert (rotate_half_split(ours, *angles) == theirs[0].transpose(0, 1)).all()
    assert len({row.numpy().tobytes() for row in angles[0].float()}) == len(positions)


def test_rotation_is_complex_multiplication() -> None:
    """Pair (i, i + D/2) turns by position * theta ** (-2i / D): norms stay, and scores see distances only."""
    _, model = configs("default")
    inv_freq, factor = frequencies(model, model.rope_theta)
    x = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 40, 41])
    cos, sin = (part.double() for part in cos_sin(positions, inv_freq, factor, torch.float32))
    turned = rotate_half_split(x, cos, sin).numpy()
    angles = positions.numpy()[:, None, None] * 1e4 ** (-np.arange(16) / 16)
    expected = (x.numpy()[..., :16] + 1j * x.numpy()[..., 16:]) * np.exp(1j * angles)
    np.testing.assert_allclose(turned[..., :16] + 1j * turned[..., 16:], expected, atol=1e-5)
    assert (turned[0] == x[0].numpy()).all()
    q, k = x[0], x[1]

    def score(at: int, of: int) -> float:
        angles = cos_sin(torch.tensor([at, of]), inv_freq, factor, torch.float32)
        a, b = rotate_half_split(torch.stack([q, k]), *(part.double() for part in angles))
        return float((a * b).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert not math.isclose(score(9, 4), score(9, 5), abs_tol=1e-2)


@pytest.mark.parametrize(("family", "home"), [("glm4", modeling_glm4), ("phi3", modeling_phi3)])
def test_parts_of_heads_and_neighbours_are_rotated_as_transformers_does(family: str, home: Any) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = ModelConfig.from_hf(tiny_config(family, head_dim=16, rope_parameters=rope).to_dict())
    assert (model.rotary_dim, model.neighbours) == (8, family == "glm4")
    x = torch.randn(6, 4, 16, generator=torch.Generator().manual_seed(1))
    cos, sin = cos_sin(torch.arange(6), frequencies(model, 1e4)[0], 1.0, torch.float32)
    both = [torch.cat((one, one), -1).transpose(0, 1) for one in (cos, sin)]  # [1, T, rotary_dim]
    expected, _ = home.apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *both)
    found = in_heads_of(model, rotate_half_split)(x, cos, sin)
    assert torch.equal(found, expected[0].transpose(0, 1))


def test_layers_that_do_not_rotate_give_what_they_are_given() -> None:
    model = ModelConfig.from_hf(tiny_config("smollm3", no_rope_layers=[1, 0, 1]).to_dict())
    x = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1))
    for layer, same in enumerate((False, True, False)):
        own = model.of_layer(layer)
        tables = cos_sin(torch.arange(6), frequencies(own, own.rope_theta)[0], 1.0, torch.float32)
        assert torch.equal(in_heads_of(own, rotate_half_split)(x, *tables), x) == same
