"""Keys in blocks that are put together wrongly, and denominators that are no sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workbench.diagnosis.variants.attention_run import At, Run, causes, model, names

pytestmark = pytest.mark.sampled_file(3)


def with_probs(change: Any) -> Any:
    """The context anew, of other probabilities than those that were recorded."""

    def spoil(x: Tensor, at: At) -> Tensor:
        values = at.taps["v_cache"].repeat_interleave(2, 1)
        return torch.einsum("htk,khd->thd", change(at.taps["probs"]), values).reshape(x.shape)

    return spoil


def mean_of_blocks(p: Tensor) -> Tensor:
    """Blocks of 4 keys, each of its own softmax, with equal shares."""
    blocks = [p[..., i : i + 4] for i in range(0, p.shape[2], 4)]
    sums = [x.sum(-1, True) for x in blocks]
    seen = sum((s > 0).float() for s in sums)
    return torch.cat([x / s.clamp(min=1e-30) / seen for x, s in zip(blocks, sums, strict=True)], -1)


def without_the_rest(p: Tensor) -> Tensor:
    """The keys behind the last whole block of 4 are left out."""
    last = (p.shape[2] - 1) // 4 * 4
    return torch.where(torch.arange(p.shape[2]) < last, p, 0 * p) if p.shape[1] == 1 else p


def lost_terms(p: Tensor) -> Tensor:
    """In the denominator every third key is missing."""
    return p / (p * (torch.arange(p.shape[2]) % 3 != 1)).sum(-1, True)


def in_two(weights: Any, at: Any = lambda keys: keys // 2, decode: bool = True) -> Any:
    """Flash decoding in two parts, of lengths by `at(keys)`, weighted by `weights(sums, largest)` [.., 2]."""

    def change(p: Tensor) -> Tensor:
        if decode and p.shape[1] > 1:
            return p
        parts = p.split([at(p.shape[2]), p.shape[2] - at(p.shape[2])], -1)
        sums = torch.stack([x.sum(-1) for x in parts], -1)
        w = weights(sums, torch.stack([x.amax(-1) for x in parts], -1))
        w = w / w.sum(-1, keepdim=True)
        return torch.cat([x * (w / sums)[..., i, None] for i, x in enumerate(parts)], -1)

    return change


def not_rescaled(p: Tensor) -> Tensor:
    """Online softmax in blocks of 4: what is in the accumulator stays when the maximum grows."""
    top = torch.cat([p[..., :i].amax(-1, True) for i in range(4, p.shape[2] + 4, 4)], -1)
    return p * p.amax(-1, True) / top.repeat_interleave(4, -1)[..., : p.shape[2]]


SPLITS: list[tuple[str, str, Any, str, str]] = [
    # id, tap, what is done, the cause's name, words of its text
    ("mean", "context", with_probs(mean_of_blocks), "context_split_keys", "blocks of 4"),
    ("rest", "context", with_probs(without_the_rest), "context_split_keys", "left out"),
    ("mean of probs", "probs", lambda x, at: mean_of_blocks(x), "softmax_split_keys", "counts the same"),
    (
        "base 2",
        "context",
        with_probs(in_two(lambda s, _: s**1.442695, lambda keys: 5)),
        "context_split_keys",
        "to base 2",
    ),
    (
        "halves",
        "context",
        with_probs(in_two(lambda s, _: 0 * s + 1)),
        "context_split_keys",
        "counts the same",
    ),
    (
        "no maximum",
        "context",
        with_probs(in_two(lambda s, top: s / top)),
        "context_split_keys",
        "maxima are left",
    ),
    (
        "exchanged",
        "context",
        with_probs(in_two(lambda s, _: s.flip(-1))),
        "context_split_keys",
        "that of the part before it",
    ),
    ("not rescaled", "context", with_probs(not_rescaled), "context_split_keys", "not rescaled"),
    ("no known rule", "context", with_probs(in_two(lambda s, _: s**0.3)), "context_split_keys", "are wrong"),
    (
        "denominator",
        "probs",
        lambda x, at: lost_terms(x),
        "softmax_denominator",
        "missing in the denominator",
    ),
]


@pytest.mark.parametrize(
    ("tap", "spoil", "name", "words"), [one[1:] for one in SPLITS], ids=[one[0] for one in SPLITS]
)
@pytest.mark.sampled(4)
def test_blocks_put_together_wrongly_are_named(tap: str, spoil: Any, name: str, words: str) -> None:
    found = causes(Run(model(), {tap: spoil}), tap)
    assert found, "nothing named"
    assert (found[0].variant.name, words in found[0].variant.text) == (name, True), found[0].variant.text


@pytest.mark.slow
def test_parts_joined_wrongly_in_a_fused_kernel_are_named() -> None:
    spoil = {"context": with_probs(in_two(lambda s, _: s**1.442695))}
    found = causes(Run(model(), spoil, fused=True), "context")
    assert (found[0].variant.name, found[0].variant.kind) == ("context_split_keys", "context")
    assert "to base 2 on one side" in found[0].variant.text


@pytest.mark.parametrize("tap", ["probs", "context"])
def test_random_damage_is_not_blamed_on_blocks(tap: str) -> None:
    noise = torch.Generator().manual_seed(5)
    run = Run(model(), {tap: lambda x, at: x * (1 + torch.rand(x.shape, generator=noise))})
    assert names(run, tap) == []


@pytest.mark.slow
def test_random_damage_to_a_fused_context_is_not_blamed_on_parts() -> None:
    noise = torch.Generator().manual_seed(5)
    spoil = {"context": lambda x, at: x * (1 + torch.rand(x.shape, generator=noise))}
    assert names(Run(model(), spoil, fused=True), "context") == []


@pytest.mark.parametrize("fused", [False, True])
def test_a_part_whose_heads_are_read_by_another_stride_is_named(fused: bool) -> None:
    """The first six keys, whose result lies in memory with twenty elements a head where sixteen are written."""

    def context(x: Tensor, at: At) -> Tensor:
        if not at.step:
            return x
        values = at.taps["v_cache"].repeat_interleave(2, 1)
        own, other = (
            torch.einsum("htk,khd->thd", at.taps["probs"][..., keys], values[keys])
            for keys in (slice(6), slice(6, None))
        )
        mass = at.taps["probs"][..., :6].sum(-1).T[..., None]
        memory = torch.cat([(own / mass).flatten(), torch.full((64,), 0.25)])
        return (mass * memory.as_strided(own.shape, (1, 20, 1)) + other).reshape(x.shape)

    run = Run(model(), {"context": context}, fused=fused)
    (first, *_) = causes(run, "context")
    assert first.variant.name == "context_part_strided"
    assert "the first part is read from a head to the next by 20 elements instead of 16" in first.variant.text
