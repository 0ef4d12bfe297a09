"""What fits a byte budget stays untouched; what does not is thinned, and reported."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.sessions import LayoutError, TensorRecord, slices
from lockstep.sessions.budget import fit
from lockstep.sessions.layouts import rebuild_records

PROBS = "layers.0.attn.probs"


def probs(seed: int, heads: int = 2, positions: int = 50, dtype: str = "float32") -> list[TensorRecord]:
    rng = np.random.default_rng(seed)
    return [
        TensorRecord(PROBS, rank, 0, rng.random((heads, 1, positions)).astype(dtype), dtype)
        for rank in range(2)
    ]


def size(tensors: list[TensorRecord]) -> int:
    return sum(t.array.nbytes for t in tensors)


def test_what_fits_is_left_alone() -> None:
    tensors = probs(0)
    kept, words = fit(tensors, size(tensors))
    assert [a is b for a, b in zip(kept, tensors, strict=True)] == [True, True]
    assert words == []


def test_attention_is_halved_first() -> None:
    tensors = [*probs(0), TensorRecord("embed", 0, 0, np.ones(100, np.float32), "float32")]
    kept, words = fit(tensors, size(tensors) - 1)
    assert [t.dtype for t in kept] == ["float16", "float16", "float32"]
    assert words == ["1 attention tensors kept in float16"]


def test_scores_that_float16_cannot_hold_keep_their_type() -> None:
    scores = np.array([[[1e6, -np.inf, 3.0, 2.0]]], np.float32)
    kept, words = fit([TensorRecord("layers.0.attn.scores", 0, 0, scores, "float32")], 12)
    assert (kept[0].dtype, kept[0].slice) == ("float32", ":,:,{0;2;3}")
    assert words == ["layers.0.attn.scores of sequence 0: the 3 strongest of 4 positions"]


def test_the_strongest_positions_stay_the_same_on_every_rank() -> None:
    tensors = probs(1)
    kept, words = fit(tensors, 100)
    assert size(kept) <= 100
    assert len({t.slice for t in kept}) == 1
    positions = slices.parse(kept[0].slice)[-1]
    peak = np.max([t.array.max(axis=(0, 1)) for t in tensors], axis=0).astype(np.float16)
    assert min(peak[positions]) >= max(np.delete(peak, positions))
    whole = rebuild_records("shard(0)", {t.rank: t for t in kept}, 2)
    assert whole.array.shape == (4, 1, len(positions))
    expected = slices.apply(np.concatenate([t.array for t in tensors]), kept[0].slice)
    assert np.array_equal(whole.array, expected.astype(np.float16))
    assert words[-1].endswith(f"the {len(positions)} strongest of 50 positions")


def test_of_many_rows_the_positions_that_get_most_stay_and_what_was_cut_stays_cut() -> None:
    rows = np.tril(np.full((6, 6), 0.01, np.float32))
    rows[:, 1] += 0.5  # attended to by all
    rows[3, 3] = 0.9  # by one
    tensor = TensorRecord(PROBS, 0, 0, rows[None, 2:], "float32", ":,-4:")
    kept, words = fit([tensor], 4 * 2 * 2)
    assert kept[0].slice == ":,-4:,{1;3}"
    assert np.array_equal(kept[0].array, rows[None, 2:, [1, 3]].astype(np.float16))
    assert words[-1].endswith("the 2 strongest of 6 positions")
    scores = np.where(np.tril(np.ones((6, 6))) > 0, np.log(np.maximum(rows, 1e-6)), -np.inf)
    same = TensorRecord("layers.0.attn.scores", 0, 0, scores[None].astype(np.float32), "float32")
    assert fit([same], 6 * 2 * 2)[0][0].slice.endswith("{0;1}"), "what the mask hides does not count"


def test_whole_taps_go_last_and_the_largest_first() -> None:
    small, large = (
        [TensorRecord(tap, r, 0, np.ones(n, np.float32), "float32") for r in range(2)]
        for tap, n in (("embed", 10), ("logits", 1000))
    )
    kept, words = fit([*large, *small], 80)
    assert kept == small
    assert words == ["logits of sequence 0 left out (8000 bytes)"]
    assert fit(small, 0) == ([], ["embed of sequence 0 left out (80 bytes)"])


@settings(deadline=None)
@given(
    budget=st.integers(0, 3000), seeds=st.lists(st.integers(0, 9), max_size=3, unique=True), data=st.data()
)
def test_the_budget_holds_and_every_loss_is_reported(
    budget: int, seeds: list[int], data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from(["float32", "float16"]))
    tensors = [
        TensorRecord(t.tap, t.rank, seed, t.array, t.dtype)
        for seed in seeds
        for t in probs(seed, dtype=dtype)
    ]
    tensors.append(
        TensorRecord("embed", 0, 0, np.ones(data.draw(st.integers(0, 300)), np.float32), "float32")
    )
    kept, words = fit(tensors, budget)
    assert size(kept) <= budget
    assert bool(words) == (size(tensors) > budget)


@pytest.mark.parametrize("part", ["x", "1", "{}", "{-1}", "::2", "a:b", "1:2:3"])
def test_other_strings_are_no_slices(part: str) -> None:
    with pytest.raises(LayoutError, match="no slice"):
        slices.parse(part)


def test_slices_are_numpys() -> None:
    array = np.arange(24).reshape(2, 3, 4)
    assert np.array_equal(slices.apply(array, ":,-1:,{3;0}"), array[:, -1:, [3, 0]])
    assert np.array_equal(slices.apply(array, ""), array)
    assert np.array_equal(slices.apply(array, "1:"), array[1:])
    for part in (":,:,:,:", "{2}"):
        with pytest.raises(LayoutError):
            slices.apply(array, part)
