"""Masks of sparse attention are read off the scores; so are cosines and stale keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workbench.diagnosis.variants.attention_run import At, Run, causes, model

pytestmark = pytest.mark.sampled_file(2)

INF = torch.inf


def under(allow: Any) -> Any:
    """The right scores under another mask: `allow(query positions [T, 1], key positions [K])`."""

    def spoil(x: Tensor, at: At) -> Tensor:
        k = at.taps["k_cache"].repeat_interleave(2, 1)
        raw = torch.einsum("thd,khd->htk", at.taps["q_rope"], k) * at.run.model.head_dim**-0.5
        queries, keys = torch.arange(at.start, at.start + x.shape[1])[:, None], torch.arange(x.shape[2])
        return raw.masked_fill(~(allow(queries, keys) & (keys <= queries)), -INF)

    return spoil


MASKS: list[tuple[Any, str, str]] = [
    (lambda q, k: (k < 2) | (q - k < 3), "mask_first_and_newest", "the first 2 keys and the newest 3"),
    (lambda q, k: (q - k) % 2 == 0, "mask_strided", "multiples of 2"),
    (lambda q, k: (k // 2 + 0 * q) % 2 == 0, "mask_every_other_block", "blocks of 2"),
    (lambda q, k: q // 2 - k // 2 < 2, "mask_window_of_blocks", "in blocks of 2"),
    (lambda q, k: (k < q) | (q == 0), "mask_strict", "does not see itself"),
]


def test_the_mask_of_the_next_token_is_named() -> None:
    """Of a layer with a window: one key of the future, and one too few of the past."""
    windowed = replace(model(), windows=(4, 4, 4))

    def spoil(x: Tensor, at: At) -> Tensor:
        k = at.taps["k_cache"].repeat_interleave(2, 1)
        raw = torch.einsum("thd,khd->htk", at.taps["q_rope"], k) * at.run.model.head_dim**-0.5
        far = torch.arange(at.start, at.start + x.shape[1])[:, None] - torch.arange(x.shape[2])
        return raw.masked_fill((far < -1) | (far >= 3), -INF)

    (first, *_) = causes(Run(windowed, {"scores": spoil}), "scores")
    assert (first.variant.name, "the mask of the token after it" in first.variant.text) == (
        "mask_ahead",
        True,
    )


@pytest.mark.parametrize(("allow", "name", "words"), MASKS, ids=[one[1] for one in MASKS])
def test_sparse_and_shifted_masks_are_named(allow: Any, name: str, words: str) -> None:
    spoil = under(allow)
    prefill = (lambda x, at: spoil(x, at) if at.step == 0 else x) if "strict" in name else spoil
    found = causes(Run(model(), {"scores": prefill}), "scores")
    assert (found[0].variant.name, words in found[0].variant.text) == (name, True), found[0].variant.text


@pytest.mark.parametrize(
    ("shown", "reported"), [(6, "mask_first_keys"), (3, "mask_first_keys")], ids=["six keys", "three keys"]
)
def test_keys_that_end_are_no_pattern_of_blocks(shown: int, reported: str) -> None:
    found = causes(Run(model(), {"scores": under(lambda q, k: (k < shown) & (q >= 0))}), "scores")
    assert {one.variant.name for one in found} == {reported}


def test_irregular_holes_are_no_pattern() -> None:
    holes = torch.randint(0, 2, (40, 40), generator=torch.Generator().manual_seed(2)).bool()
    found = causes(Run(model(), {"scores": under(lambda q, k: holes[q, k] | (q == k))}), "scores")
    assert {one.variant.name for one in found} == {"mask_irregular"}


def test_cosines_and_a_stale_newest_key_are_named() -> None:
    def of(change: Any) -> Any:
        def spoil(x: Tensor, at: At) -> Tensor:
            q, k = change(at.taps["q_rope"], at.taps["k_cache"])
            raw = torch.einsum("thd,khd->htk", q, k.repeat_interleave(2, 1)) * at.run.model.head_dim**-0.5
            return raw.masked_fill(x == -INF, -INF)

        return spoil

    unit = torch.nn.functional.normalize
    cosines = causes(Run(model(), {"scores": of(lambda q, k: (unit(q, dim=-1), unit(k, dim=-1)))}), "scores")
    assert cosines[0].variant.name == "scores_normalised"
    stale = causes(Run(model(), {"scores": of(lambda q, k: (q, torch.cat([k[:-1], k[-2:-1]])))}), "scores")
    assert stale[0].variant.name == "cache_rows_shifted"
