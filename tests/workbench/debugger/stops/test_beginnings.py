"""Where something wrong begins, and when that is new: against the definition, spelled out tap by tap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.taps.flow import inputs_of
from lockstep.engine.taps.names import tap_specs
from lockstep.workbench.debugger.stops.beginnings import Beginning, DataFlow, carries

NAMES = [spec.name for spec in tap_specs(2)]
FLOW = DataFlow(NAMES)
RANKS = 2


def wrong(*cells: str) -> np.ndarray:
    """Where it is: `TAP` on every rank, or `TAP@RANK`."""
    table = np.zeros((len(NAMES), RANKS), dtype=bool)
    for cell in cells:
        name, _, rank = cell.partition("@")
        table[NAMES.index(name), slice(None) if not rank else int(rank)] = True
    return table


def cells(table: np.ndarray) -> list[str]:
    return [f"{NAMES[place]}@{rank}" for place, rank in zip(*np.nonzero(table), strict=True)]


@given(st.lists(st.sampled_from([f"{name}@{rank}" for name in NAMES for rank in range(RANKS)]), max_size=30))
def test_it_begins_where_no_input_has_it_on_any_rank(found: list[str]) -> None:
    held = {cell.partition("@")[0] for cell in found}
    begins = {cell for cell in found if not held & set(inputs_of(cell.partition("@")[0], 2, NAMES))}
    assert set(cells(FLOW.begun(wrong(*found), None))) == begins


def test_all_that_follows_is_inherited() -> None:
    after = NAMES[NAMES.index("layers.0.attn.scores") :]
    assert cells(FLOW.begun(wrong(*after), None)) == ["layers.0.attn.scores@0", "layers.0.attn.scores@1"]


def test_one_rank_hands_it_to_all_through_a_sum() -> None:
    found = wrong("layers.0.attn.o_proj.partial@1", "layers.0.attn.o_proj", "layers.0.attn_residual")
    assert cells(FLOW.begun(found, None)) == ["layers.0.attn.o_proj.partial@1"]


def test_a_cache_with_rows_of_an_earlier_step_begins_nothing() -> None:
    cache = wrong("layers.1.attn.k_cache")
    assert cells(FLOW.begun(cache, None)) == ["layers.1.attn.k_cache@0", "layers.1.attn.k_cache@1"]
    assert not FLOW.begun(cache, cache).any()
    assert cells(FLOW.begun(cache, wrong("layers.1.attn.k_cache@0"))) == ["layers.1.attn.k_cache@1"]
    again = wrong("layers.1.mlp.gate")
    assert (FLOW.begun(again, again) == again).all(), "what no operation remembers begins in each step anew"


def test_places_that_cannot_report_are_as_their_inputs() -> None:
    found = wrong("layers.0.attn.o_proj", "layers.0.attn_residual", "layers.0.mlp_norm", "layers.0.mlp.down")
    blind = {place for place, name in enumerate(NAMES) if name.endswith(("gate", "up", "act", ".partial"))}
    assert cells(FLOW.begun(found, None, blind)) == ["layers.0.attn.o_proj@0", "layers.0.attn.o_proj@1"]
    assert "layers.0.mlp.down@0" in cells(FLOW.begun(found, None)), (
        "without knowing better it would begin anew"
    )


def test_names_that_show_nothing_hand_on_from_tap_to_tap() -> None:
    flow = DataFlow(["first", "second", "third"])
    table = np.array([[False], [True], [True]])
    assert flow.begun(table, None)[:, 0].tolist() == [False, True, False]


def at(step: int) -> Beginning:
    return Beginning(0, step, 9, 1)


@pytest.mark.parametrize(
    ("reported", "before", "carried"),
    [
        ({4}, [7, 6, 5, 4], True),  # every step since has had it
        ({7}, [7], True),
        ({4}, [7, 6], False),  # it was gone in step 5
        (set(), [7, 6, 5, 4], False),  # passed without being reported
    ],
)
def test_what_was_reported_is_carried_on_without_a_gap(
    reported: set[int], before: list[int], carried: bool
) -> None:
    known = {at(step) for step in reported}
    assert carries(known, at(8), [at(step) for step in before]) is carried
    assert (at(8) in known) is carried, "so that the next step needs to look back at this one alone"
