"""What the ranks hold of the weights, as `info weights` leaves it in a session, by branch (torch-free)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sessions.meta import SessionMeta, WeightShare
from sessions.records import STATISTICS
from sessions.text import clean

#: A row: what is known of one rank's share of a parameter; the last says how it compares with the checkpoint.
WEIGHT_COLUMNS = ("name", "rank", "shape", "dtype", *STATISTICS, "checksum", "checkpoint")

#: The most rows that are believed of a foreign session.
_MOST = 200_000


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's share of a parameter; `checkpoint` says how it compares: "equal", "different", "absent" (the
    checkpoint has no such tensor)."""

    rank: int
    shape: str
    rms: float
    absmax: float
    checksum: str
    checkpoint: str
    empty: bool  # nothing but zeros

    @property
    def equal(self) -> bool:
        """Whether the rank holds bit for bit what the checkpoint has there."""
        return self.checkpoint == "equal"


def held(meta: SessionMeta, branch: int) -> dict[str, dict[int, Held]]:
    """By parameter and rank; empty where nobody has looked on this branch."""
    found: dict[str, dict[int, Held]] = {}
    for share in meta.weights.get(branch, ())[:_MOST]:
        found.setdefault(clean(share.name, limit=120), {})[share.rank] = _held(share)
    return found


def shape_text(shape: Sequence[int]) -> str:
    """ "2003×256"."""
    return "×".join(map(str, shape))


def _held(share: WeightShare) -> Held:
    return Held(
        rank=share.rank,
        shape=clean(shape_text(share.shape), limit=40),
        rms=share.statistic("rms"),
        absmax=share.statistic("absmax"),
        checksum=clean(share.checksum, limit=16),
        checkpoint=clean(share.checkpoint, limit=12),
        empty=share.empty,
    )
