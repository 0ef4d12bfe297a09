"""A tensor laid out as a sheet: whatever the layout, each cell is the element that its coordinates name."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.sessions.meta import ModelMeta
from lockstep.workbench.views.axes import Axis, by_head, parameter_axes, tap_axes
from lockstep.workbench.views.sheet import arrangements, fold, sheet

MODEL = ModelMeta(num_heads=4, num_kv_heads=2, head_dim=8)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(0, 9),
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.booleans(),
)
def test_each_cell_is_the_element_that_its_coordinates_name(
    shape: list[int], way: int, index: int, room: tuple[int, int], heads: bool
) -> None:
    values = np.random.default_rng(0).permutation(math.prod(shape)).astype(np.float32).reshape(shape)
    names = ("head" if heads else "token", "b", "c", "d")
    axes = [
        Axis(name, range(10 * i, 10 * i + size))
        for i, (name, size) in enumerate(zip(names, shape, strict=False))
    ]
    ways = arrangements(axes)
    laid = sheet(values, -values, axes, ways[way % len(ways)], index, room)
    seen = set()
    for row in range(laid.values.shape[0]):
        for column in range(laid.values.shape[1]):
            place = dict(laid.coordinates(row, column))
            if not place:
                assert row * laid.values.shape[1] + column >= laid.count
                continue
            element = tuple(place[axis.name] - axis.numbers[0] for axis in axes)
            assert laid.values[row, column] == values[element]
            assert laid.beside is not None
            assert laid.beside[row, column] == -values[element]
            seen.add(element)
    sliced = laid.arrangement.sliced
    assert len(seen) == laid.count == values.size // (1 if sliced is None else shape[sliced])


@pytest.mark.parametrize("count", [64, 256, 768, 896, 1187, 2003, 4864])
@pytest.mark.parametrize("room", [(40, 20), (56, 44), (100, 80)])
def test_a_long_row_is_folded_to_fill_its_room(count: int, room: tuple[int, int]) -> None:
    width, height = room
    columns = fold(count, *room)
    rows = -(-count // columns)
    if count <= width * height * 0.8:
        assert columns <= width
        assert rows <= height
    across, down = max(1, width // columns), max(1, height // rows)
    shown = min(width, columns * across) * min(height, rows * down)
    assert shown >= 0.6 * width * height


def test_taps_have_tokens_heads_and_channels() -> None:
    def names(tap: str, shape: tuple[int, ...], part: str = "") -> list[tuple[str, list[int]]]:
        axes = by_head(tap, tap_axes(tap, shape, part, [5, 6, 7]), MODEL.head_dim)
        return [(axis.name, list(axis.numbers)) for axis in axes]

    heads, channels = ("head", [0, 1, 2, 3]), ("channel", list(range(8)))
    assert names("layers.0.attn.q_proj", (3, 32)) == [("token", [5, 6, 7]), heads, channels]
    assert names("layers.0.attn.k_cache", (8, 2, 8)) == [
        ("token", list(range(8))),
        ("kv head", [0, 1]),
        channels,
    ]
    assert names("layers.0.attn.probs", (4, 3, 8)) == [heads, ("query", [5, 6, 7]), ("key", list(range(8)))]
    assert names("layers.0.attn.probs", (4, 3, 2), ":,:,{1;6}")[2] == ("key", [1, 6])
    assert names("layers.0.attn.probs", (4, 1, 8), ":,-1:")[1] == ("query", [7])
    assert names("embed", (3, 5)) == [("token", [5, 6, 7]), ("channel", [0, 1, 2, 3, 4])]
    assert names("logits", (1, 4)) == [("token", [7]), ("id", [0, 1, 2, 3])]
    assert names("layers.0.attn.q_proj", (3, 31))[1][0] == "channel", "no heads of 8 in 31 channels"
    assert [name for name, _ in names("anything", (2, 2, 2, 2))] == ["dim 0", "dim 1", "dim 2", "dim 3"]
    for odd in ("no slice", "{99}", "5:2", "-3:"):
        assert [len(numbers) for _, numbers in names("embed", (3, 5), odd)] == [3, 5]


def test_parameters_have_heads_too() -> None:
    name = "model.layers.0.self_attn.k_proj"
    bias = by_head(f"{name}.bias", parameter_axes(f"{name}.bias", (16,)), 8)
    assert [(axis.name, len(axis)) for axis in bias] == [("kv head", 2), ("channel", 8)]
    weight = by_head(f"{name}.weight", parameter_axes(f"{name}.weight", (16, 12)), 8)
    assert [(axis.name, len(axis)) for axis in weight] == [("kv head", 2), ("channel", 8), ("input", 12)]
    other = by_head("model.norm.weight", parameter_axes("model.norm.weight", (16,)), 8)
    assert [axis.name for axis in other] == ["channel"]


def test_what_a_mask_hides_is_no_value_and_nan_comes_first() -> None:
    values = np.array([[1, -np.inf, np.nan], [-9, 2, np.inf]], np.float32)
    axes = [Axis("query", range(2)), Axis("key", range(3))]
    laid = sheet(values, None, axes, arrangements(axes)[0], 0, (10, 10), masked=True)
    assert np.isnan(laid.strongest()[0].value)
    assert [one.value for one in laid.strongest()[1:]] == [np.inf, -9, 2, 1]
    assert laid.elements.size == 5
    plain = sheet(values, None, axes, arrangements(axes)[0], 0, (10, 10))
    assert plain.elements.size == 6
    assert -np.inf in [one.value for one in plain.strongest()]
