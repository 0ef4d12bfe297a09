"""What `info weights` leaves in a session, read back by parameter and rank."""

from __future__ import annotations

import math

from lockstep.sessions.meta import SessionMeta, WeightShare
from lockstep.workbench.views.rank_weights import rank_shares, shape_text

NAME = "model.layers.0.self_attn.q_proj.bias"


def _share(rank: int = 0, *, rms: float = 0.5, zeros: float = 0, checkpoint: str = "equal") -> WeightShare:
    #             min   max  mean  rms absmax nan inf zeros
    statistics = (-1.0, 2.0, 0.25, rms, 2.0, 0.0, 0.0, zeros)
    return WeightShare(NAME, rank, (2, 16), "float32", statistics, "ab" * 8, checkpoint)


def test_a_share_is_known_by_parameter_and_rank() -> None:
    found = rank_shares(SessionMeta(weights={3: (_share(0), _share(1, zeros=32, checkpoint="different"))}), 3)
    first, second = found[NAME][0], found[NAME][1]
    assert (shape_text(first.shape), first.statistic("rms"), first.checksum) == ("2×16", 0.5, "ab" * 8)
    assert first.equal
    assert not second.equal
    assert (first.empty, second.empty) == (False, True)  # 32 zeros of 2×16 elements


def test_only_the_branch_that_was_looked_at_knows_anything() -> None:
    assert rank_shares(SessionMeta(weights={3: (_share(),)}), 0) == {}
    assert rank_shares(SessionMeta(), 3) == {}


def test_a_share_that_overflowed_is_shown_as_what_it_is() -> None:
    """Such a rank is the one that matters most."""
    shares = (_share(0, rms=math.nan), _share(1, rms=math.inf), _share(2, rms=-math.inf))
    found = rank_shares(SessionMeta(weights={0: shares}), 0)
    assert math.isnan(found[NAME][0].statistic("rms"))
    assert [found[NAME][rank].statistic("rms") for rank in (1, 2)] == [math.inf, -math.inf]
