"""Norms and rotations of few rows, against float64 and against torch's own bits."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from lockstep.engine.compiled import kernels
from lockstep.engine.rows import products, vectors
from lockstep.engine.rules.norm import rms_norm
from lockstep.engine.rules.rope import cos_sin, rotate_half_split

FREQUENCIES = 10_000.0 ** (-torch.arange(0, 64, 2) / 64)


def angles(tokens: int) -> tuple[Tensor, Tensor]:
    return cos_sin(torch.arange(300, 300 + tokens), FREQUENCIES, 1.0, torch.float32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["rms", "plus_one"])
@pytest.mark.parametrize("shape", [(1, 896), (2, 33), (2, 3, 64), (1, 1)])
def test_a_norm_is_that_of_float64(shape: tuple[int, ...], form: str) -> None:
    x, weight = 3 * torch.randn(shape), torch.randn(shape[-1])
    with products.reading():
        found = rms_norm(x, weight, 1e-5, form)
        assert vectors.rms_norm(x, weight, 1e-5) is not None
    wide = x.double()
    right = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + (form != "rms"))
    assert (found.double() - right).abs().max() <= 4 * torch.finfo(torch.float32).eps * right.abs().max()


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_rotation_has_the_bits_of_torch(tokens: int) -> None:
    """Of heads that lie in a packed product of q, k and v as well."""
    packed = torch.randn(tokens, 9 * 64)
    for part in packed.split((5 * 64, 2 * 64, 2 * 64), -1):
        x = part.unflatten(-1, (-1, 64))
        right = rotate_half_split(x, *angles(tokens))
        with products.reading():
            assert vectors.rotate(x, *angles(tokens)) is not None
            assert torch.equal(rotate_half_split(x, *angles(tokens)), right)


def test_the_bits_of_a_row_depend_on_no_other_and_not_on_where_it_lies() -> None:
    """Ranks hold replicas of a norm, which are compared bit by bit."""
    x, weight = torch.randn(2, 897), torch.randn(897)
    with products.reading():
        both = vectors.rms_norm(x, weight, 1e-6)
        assert both is not None
        for shift in range(4):
            moved = torch.empty(897 + shift)[shift:].copy_(x[1])
            assert torch.equal(vectors.rms_norm(moved[None], weight, 1e-6), both[1:])


def test_a_norm_of_infinities_and_nan_is_that_of_torch() -> None:
    weight = torch.ones(4)
    for values in ([1.0, float("inf"), 2.0, 3.0], [1.0, float("nan"), 2.0, 3.0], [0.0] * 4, [3e30] * 4):
        x = torch.tensor([values])
        right = rms_norm(x, weight, 1e-6)
        with products.reading():
            assert torch.allclose(rms_norm(x, weight, 1e-6), right, equal_nan=True), values


def test_what_is_not_for_the_kernels_is_left_to_torch() -> None:
    x, weight, (cos, sin) = torch.randn(1, 2, 64), torch.randn(64), angles(1)
    assert vectors.rms_norm(x, weight, 1e-6) is None  # outside
    assert vectors.rotate(x, cos, sin) is None
    with products.reading():
        for other in (weight.double(), weight[:1], torch.randn(128)[::2]):
            assert vectors.rms_norm(x, other, 1e-6) is None
        assert vectors.rms_norm(x.to(torch.bfloat16), weight, 1e-6) is None
        for other in (x.double(), x[0], x[..., :32], torch.randn(1, 2, 128)[..., ::2], torch.randn(2, 2, 64)):
            assert vectors.rotate(other, cos, sin) is None
        assert vectors.rotate(x, cos[0], sin[0]) is None
        assert vectors.rotate(torch.randn(1, 2, 65), cos, sin) is None
        assert vectors.rotate(x, torch.randn(1, 1, 64)[..., ::2], sin) is None


def test_without_numba_torch_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(vectors, "kernels", kernels.__wrapped__)
    refusal = vectors.refusal.__wrapped__()
    assert refusal is not None
    assert refusal.startswith("no norms of few rows here: ModuleNotFoundError")
    monkeypatch.setattr(vectors, "refusal", lambda: refusal)
    with products.reading():
        assert vectors.rms_norm(torch.randn(1, 4), torch.randn(4), 1e-6) is None


@pytest.mark.parametrize("wrong", ["_rms_norm", "_rotate"])
def test_a_wrong_kernel_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(vectors, wrong)
    monkeypatch.setattr(vectors, wrong, lambda *given: right(*given) + 1e-2)
    assert vectors.refusal.__wrapped__() == "no norms of few rows here: a kernel is wrong on this CPU"
