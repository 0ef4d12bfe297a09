"""Keys in blocks that are put together wrongly, and denominators that are no sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workbench.diagnosis.variants.attention_run import At, Run, causes, model, names


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
    """In the denominator keys at odd places are missing."""
    return p / p[..., ::2].sum(-1, True)


SPLITS: list[tuple[str, str, Any, str, str]] = [
    # id, tap, what is done, the cause's name, words of its text
    ("mean", "context", with_probs(mean_of_blocks), "context_split_keys", "blocks of 4"),
    ("rest", "context", with_probs(without_the_rest), "context_split_keys", "left out"),
    ("mean of probs", "probs", lambda x, at: mean_of_blocks(x), "softmax_split_keys", "counts the same"),
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
def test_blocks_put_together_wrongly_are_named(tap: str, spoil: Any, name: str, words: str) -> None:
    found = causes(Run(model(), {tap: spoil}), tap)
    assert found, "nothing named"
    assert (found[0].variant.name, words in found[0].variant.text) == (name, True), found[0].variant.text


@pytest.mark.parametrize("tap", ["probs", "context"])
def test_random_damage_is_not_blamed_on_blocks(tap: str) -> None:
    noise = torch.Generator().manual_seed(5)
    run = Run(model(), {tap: lambda x, at: x * (1 + torch.rand(x.shape, generator=noise))})
    assert names(run, tap) == []
