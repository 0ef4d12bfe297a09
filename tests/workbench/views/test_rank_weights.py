"""What `info weights` leaves in a session, read back: whole rows, and as much as can be of a stranger's."""

from __future__ import annotations

import math

from workbench.views.rank_weights import WEIGHT_COLUMNS, held

NAME = "model.layers.0.self_attn.q_proj.bias"


def _row(
    rank: object = 0, *, rms: object = 0.5, zeros: object = 0, checkpoint: str = "equal"
) -> list[object]:
    #                                  min   max  mean  rms absmax nan inf zeros
    return [NAME, rank, "2×16", "float32", -1.0, 2.0, 0.25, rms, 2.0, 0, 0, zeros, "ab" * 8, checkpoint]


def test_a_share_is_known_by_parameter_and_rank() -> None:
    assert len(_row()) == len(WEIGHT_COLUMNS)
    found = held({"weights": {"3": [_row(0), _row(1, zeros=32, checkpoint="different")]}}, 3)
    first, second = found[NAME][0], found[NAME][1]
    assert (first.shape, first.rms, first.absmax, first.checksum) == ("2×16", 0.5, 2.0, "ab" * 8)
    assert first.equal
    assert not second.equal
    assert (first.empty, second.empty) == (False, True)  # 32 zeros of 2×16 elements


def test_only_the_branch_that_was_looked_at_knows_anything() -> None:
    assert held({"weights": {"3": [_row()]}}, 0) == {}
    assert held({}, 3) == {}


def test_a_share_that_overflowed_is_shown_as_what_it_is() -> None:
    """JSON has no NaN and no infinity: they are kept as words, and such a rank is the one that matters most."""
    found = held(
        {"weights": {"0": [_row(0, rms="NaN"), _row(1, rms="Infinity"), _row(2, rms="-Infinity")]}}, 0
    )
    assert math.isnan(found[NAME][0].rms)
    assert (found[NAME][1].rms, found[NAME][2].rms) == (math.inf, -math.inf)


def test_a_strangers_rows_are_believed_as_far_as_they_go() -> None:
    rows = ["nonsense", [NAME, 0], _row("0"), _row(True), _row(4, rms=10**400), _row(5, rms="a lot")]
    found = held({"weights": {"0": rows}}, 0)
    assert list(found[NAME]) == [4, 5]
    assert all(math.isnan(share.rms) for share in found[NAME].values())
    assert held({"weights": [rows]}, 0) == held({"weights": {"0": 7}}, 0) == {}
