"""Two mistakes in one operation, where neither alone gives what was recorded: rotations and scores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.engine.rules.rope import frequencies
from tests.workbench.diagnosis.variants.attention_run import At, Run, causes, model, names
from tests.workbench.diagnosis.variants.made import (
    DECODE,
    MODEL,
    POSITIONS,
    ROWS,
    Array,
    best,
    drawn,
    made_site,
)

pytestmark = pytest.mark.sampled_file(2)

X = drawn(np.random.default_rng(0), len(ROWS), 4, 16)
AHEAD = POSITIONS + DECODE


def turns(positions: Array, theta: float) -> Tensor:
    """e to the i times the angle of each pair, [N, 1, P]."""
    angle = torch.tensor(positions)[:, None, None] * frequencies(MODEL, theta)[0].double()
    return torch.polar(torch.ones_like(angle), angle)


def halves(by: Tensor) -> Array:
    z = torch.complex(torch.tensor(X[..., :8]), torch.tensor(X[..., 8:])) * by
    return torch.cat([z.real, z.imag], -1).numpy()


def neighbours(by: Tensor) -> Array:
    """GPT-J's rotation."""
    z = torch.view_as_complex(torch.tensor(X).reshape(*X.shape[:-1], -1, 2).contiguous()) * by
    return torch.view_as_real(z).flatten(-2).numpy()


#: What is seen, the cause, the words of both mistakes.
ROTATIONS: dict[str, tuple[Callable[[], Array], str, str, str]] = {
    "pairs and base": (
        lambda: neighbours(turns(POSITIONS, 1e4)), "rope_interleaved", "pairs (2i, 2i+1)", "rope_theta is 10000"),
    "pairs and positions": (
        lambda: neighbours(turns(AHEAD, 5e5)), "rope_interleaved", "pairs (2i, 2i+1)", "1 position too far"),
    "base and positions": (
        lambda: halves(turns(AHEAD, 1e4)), "rope_theta", "rope_theta is 10000", "1 position too far"),
    "sign and base": (
        lambda: halves(turns(-POSITIONS, 1e4)), "rope_reversed", "backwards", "rope_theta is 10000"),
    "sine for cosine and base": (
        lambda: halves(1j * turns(-POSITIONS, 1e4)), "rope_cos_sin_exchanged", "exchanged", "rope_theta is 10000"),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ROTATIONS)
def test_two_mistakes_in_a_rotation_are_both_told(case: str, dtype: str) -> None:
    make, name, one, other = ROTATIONS[case]
    found = best(made_site("rope", "layers.1.attn.q_rope", {"x": X.reshape(len(X), -1)}, make(), dtype=dtype))
    reported = [each.variant for each in found if each.variant.name == name]
    assert any(one in each.text and other in each.text for each in reported), [
        each.variant.text for each in found
    ]


def test_a_random_rotation_is_not_blamed_on_two_mistakes() -> None:
    angles = torch.tensor(drawn(np.random.default_rng(3), len(ROWS), 1, 8, size=3))
    seen = halves(torch.polar(torch.ones_like(angles), angles))
    assert best(made_site("rope", "layers.1.attn.q_rope", {"x": X.reshape(len(X), -1)}, seen)) == []


def products(at: At, reads: Callable[[int], int], scale: float) -> tuple[Tensor, Tensor]:
    """Unmasked scores [heads, T, K] of a map of heads, and what is to be hidden of them."""
    k = at.taps["k_cache"][:, [reads(head) for head in range(8)]]
    x = torch.einsum("thd,khd->htk", at.taps["q_rope"], k) * scale
    return x, torch.arange(x.shape[2]) > at.start + torch.arange(x.shape[1])[:, None]


#: The map of heads (the right one: h // 2 of 4), the scale (the right one: 1/4), whether all is seen.
SCORES: dict[str, tuple[Callable[[int], int], float, bool, str, list[str]]] = {
    "scale and mask": (lambda h: h // 2, 1.0, True, "scores_scale", ["the scale is missing", "no causal mask"]),
    "heads and scale": (lambda h: h % 4, 1.0, False, "kv_heads_tiled", ["h % n", "the scale is missing"]),
    "heads and mask": (lambda h: h % 4, 0.25, True, "kv_heads_tiled", ["h % n", "no causal mask"]),
    "all three": (lambda h: h % 4, 1.0, True, "kv_heads_tiled", ["h % n", "scale is missing", "no causal mask"]),
}  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", SCORES)
def test_mistakes_of_scores_are_all_told(case: str, dtype: torch.dtype) -> None:
    reads, scale, open_, name, words = SCORES[case]

    def spoil(x: Tensor, at: At) -> Tensor:
        x, hidden = products(at, reads, scale)
        return x if open_ else x.masked_fill(hidden, -torch.inf)

    found = causes(Run(model(), {"scores": spoil}, dtype=dtype), "scores")
    reported = [one.variant for one in found if one.variant.name == name]
    assert any(all(each in one.text for each in words) for one in reported), [
        one.variant.text for one in found
    ]


@pytest.mark.slow
def test_random_damage_under_no_mask_is_not_blamed_on_two_mistakes() -> None:
    noise = torch.Generator().manual_seed(5)

    def spoil(x: Tensor, at: At) -> Tensor:
        x, _ = products(at, lambda h: h // 2, 0.25)
        return x + torch.randn(x.shape, generator=noise)

    run = Run(model(), {"scores": spoil})
    assert "scores_scale" not in names(run, "scores")
    assert not [name for name in names(run, "scores") if name.startswith("kv_heads")]
