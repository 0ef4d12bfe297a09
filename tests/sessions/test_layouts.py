"""Cut by a layout, then rebuilt: the original; and what each kind of disagreement is called."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lockstep.sessions import Layout, LayoutError, rebuild
from lockstep.sessions.layouts import cut, parse, rebuilt_shape, sizes

SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)
FLOATS = SHAPES.flatmap(lambda shape: hnp.arrays(np.float32, shape))  # NaN and infinity included


def shape_of(layout: str, parts: Mapping[int, np.ndarray]) -> tuple[int, ...] | None:
    return rebuilt_shape(layout, {rank: part.shape for rank, part in parts.items()}, len(parts))


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@given(
    st.sampled_from(["replicate", "partial"])
    | st.builds(
        lambda d, r, g: str(Layout("shard", d, r, g)),
        st.integers(0, 9),
        st.integers(1, 64),
        st.integers(1, 64),
    )
)
def test_layout_strings_survive_parsing(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "Shard(0)", "shard", "shard(-1)", "shard(0,replicas=0)", "shard(0,groups=0)", "shard(0)x", "sum"],
)
def test_other_strings_are_no_layouts(text: str) -> None:
    with pytest.raises(LayoutError, match="no layout"):
        parse(text)


@given(array=FLOATS, data=st.data())
def test_uneven_shards_with_replicas_rebuild_to_the_original(array: np.ndarray, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, array.ndim - 1))
    replicas = data.draw(st.integers(1, 3))
    edges = sorted(data.draw(st.lists(st.integers(0, array.shape[dim]), max_size=3)))
    lengths = np.diff([0, *edges, array.shape[dim]]).tolist()
    layout = Layout("shard", dim, replicas)
    parts = cut(layout, array, len(lengths) * replicas, lengths)
    assert all(parts[rank].shape[dim] == lengths[rank // replicas] for rank in parts)
    assert sizes(layout, parts, len(parts)) == lengths
    whole = rebuild(str(layout), parts)
    assert same(whole.array, array)
    assert shape_of(str(layout), parts) == array.shape
    assert (whole.disagreeing_ranks, whole.missing_ranks, whole.note) == ((), (), "")


@given(array=FLOATS, ranks=st.integers(1, 5))
def test_replicas_rebuild_to_the_original(array: np.ndarray, ranks: int) -> None:
    parts = {rank: part.copy() for rank, part in cut("replicate", array, ranks).items()}
    whole = rebuild("replicate", parts)
    assert same(whole.array, array)
    assert shape_of("replicate", parts) == array.shape
    assert whole.disagreeing_ranks == ()


@given(
    st.lists(hnp.arrays(np.float32, (3, 4), elements=st.floats(-1e6, 1e6, width=32)), min_size=1, max_size=5)
)
def test_partial_sums_are_taken_in_float64(parts: list[np.ndarray]) -> None:
    whole = rebuild("partial", dict(enumerate(parts)))
    expected = [[sum((float(p[i, j]) for p in parts), 0.0) for j in range(4)] for i in range(3)]
    assert whole.array.dtype == np.float32
    assert np.array_equal(whole.array, np.float32(expected))
    assert shape_of("partial", dict(enumerate(parts))) == (3, 4)


def test_a_wrong_replica_is_named() -> None:
    good, bad = np.array([1.0, np.nan, -0.0], np.float32), np.array([1.0, np.nan, 0.0], np.float32)
    assert rebuild("replicate", {0: good, 1: good.copy(), 2: bad}).disagreeing_ranks == (2,)
    first = rebuild("replicate", {0: bad, 1: good, 2: good.copy(), 3: good.copy()})
    assert first.disagreeing_ranks == (0,)
    assert same(first.array, good)
    assert first.note == "rank 0 differs from the other replicas"
    pair = rebuild("replicate", {0: bad, 1: good})  # no majority: the lowest rank speaks
    assert (pair.disagreeing_ranks, same(pair.array, bad)) == ((1,), True)


def test_a_wrong_replica_of_a_shard_is_named() -> None:
    array = np.arange(8, dtype=np.float32).reshape(2, 4)
    parts = {rank: part.copy() for rank, part in cut("shard(1,replicas=2)", array, 4).items()}
    parts[3] += 1
    whole = rebuild("shard(1,replicas=2)", parts)
    assert whole.disagreeing_ranks == (3,)
    assert same(whole.array, array)


def test_missing_ranks_are_named() -> None:
    array = np.arange(8, dtype=np.float32).reshape(2, 4)
    parts = cut("shard(1,replicas=2)", array, 4)
    del parts[0]
    still = rebuild("shard(1,replicas=2)", parts, ranks=4)
    assert same(still.array, array)
    assert still.missing_ranks == (0,)
    del parts[1]
    gone = rebuild("shard(1,replicas=2)", parts, ranks=4)
    assert gone.array is None
    assert gone.note == "nothing captured on ranks 0, 1"
    assert rebuild("partial", {0: array}, ranks=2).array is None
    assert rebuild("replicate", {1: array}, ranks=2).array is array
    assert rebuild("replicate", {}, ranks=2).array is None
    assert rebuilt_shape("replicate", {0: (2, 4)}, 2) is None


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        ("shard(1)", [(2, 3), (3, 3)]),
        ("shard(2)", [(2, 3), (2, 3)]),
        ("partial", [(2, 3), (2, 4)]),
        ("shard(0,replicas=2)", [(2,), (2,), (2,)]),
    ],
)
def test_shapes_that_make_no_tensor(layout: str, shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(LayoutError) as error:
        rebuild(layout, {rank: np.zeros(shape, np.float32) for rank, shape in enumerate(shapes)})
    with pytest.raises(LayoutError):
        rebuilt_shape(layout, dict(enumerate(shapes)), len(shapes))
    assert "replicas" in str(error.value) or all(str(shape) in str(error.value) for shape in shapes)


def test_impossible_cuts() -> None:
    for layout, ranks, lengths in (("shard(0)", 2, None), ("shard(3)", 1, None), ("shard(0)", 2, [1, 1])):
        with pytest.raises(LayoutError, match="cannot be cut"):
            cut(layout, np.zeros((3, 2)), ranks, lengths)
    with pytest.raises(LayoutError, match="no dimension 1"):
        sizes(Layout("shard", 1), {0: np.zeros(3)}, 1)
    with pytest.raises(LayoutError, match="lengths"):
        sizes(Layout("shard", 0, 2), {0: np.zeros(3), 1: np.zeros(4)}, 2)
    with pytest.raises(LayoutError, match="summands"):
        cut("partial", np.zeros(3), 2)


@given(
    array=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 6)),
        elements=st.floats(-9, 9, width=32),
    ),
    groups=st.integers(1, 3),
    data=st.data(),
)
def test_rows_divided_among_groups_add_up_to_the_original(
    array: np.ndarray, groups: int, data: st.DataObject
) -> None:
    """Each row is one group's, whose ranks have its columns; the others hold zeros."""
    owner = data.draw(hnp.arrays(np.int64, array.shape[:2], elements=st.integers(0, groups - 1)))
    edges = sorted(data.draw(st.lists(st.integers(0, array.shape[2]), max_size=2)))
    lengths = np.diff([0, *edges, array.shape[2]]).tolist() * groups
    layout = Layout("shard", 2, 1, groups)
    everywhere = cut(layout, array, len(lengths), lengths)
    per_group = len(lengths) // groups
    parts = {
        rank: np.where((owner == rank // per_group)[..., None], part, 0) for rank, part in everywhere.items()
    }
    whole = rebuild(str(layout), parts)
    assert np.array_equal(whole.array, array)
    assert whole.disagreeing_ranks == ()
    assert shape_of(str(layout), parts) == array.shape
    assert rebuild(layout, {0: parts[0]}, len(lengths) + groups).array is None


def test_groups_that_ranks_do_not_divide_into_are_refused() -> None:
    with pytest.raises(LayoutError, match="do not divide into groups of 2"):
        rebuild("shard(2,groups=2)", {rank: np.zeros((1, 1, 1)) for rank in range(3)})
