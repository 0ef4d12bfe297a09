"""What the ranks hold of the weights, as `info weights` leaves it in a session's meta, by branch (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sessions.records import STATISTICS
from sessions.text import clean

#: A row: what is known of one rank's share of a parameter; the last says how it compares with the checkpoint.
WEIGHT_COLUMNS = ("name", "rank", "shape", "dtype", *STATISTICS, "checksum", "checkpoint")

#: The most rows that are believed of a foreign session.
_MOST = 200_000
_RMS, _ABSMAX, _ZEROS = (WEIGHT_COLUMNS.index(name) for name in ("rms", "absmax", "zeros"))


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


def held(meta: Mapping[str, object], branch: int) -> dict[str, dict[int, Held]]:
    """By parameter and rank; empty where nobody has looked on this branch."""
    known = meta.get("weights")
    rows = known.get(str(branch)) if isinstance(known, dict) else None
    found: dict[str, dict[int, Held]] = {}
    for row in rows[:_MOST] if isinstance(rows, list) else ():
        if isinstance(row, list) and len(row) == len(WEIGHT_COLUMNS) and type(row[1]) is int:
            found.setdefault(clean(str(row[0]), limit=120), {})[row[1]] = _held(row[1], row)
    return found


def _held(rank: int, row: list[object]) -> Held:
    shape = clean(str(row[2]), limit=40)
    count = 1
    for size in shape.split("×"):
        count *= int(size) if size.isdecimal() else 1
    return Held(
        rank=rank,
        shape=shape,
        rms=_number(row[_RMS]),
        absmax=_number(row[_ABSMAX]),
        checksum=clean(str(row[-2]), limit=16),
        checkpoint=clean(str(row[-1]), limit=12),
        empty=_number(row[_ZEROS]) == count,
    )


def _number(value: object) -> float:
    """NaN and the infinities are written as words, for JSON lacks them; NaN as well for what is no number."""
    try:
        return float(value) if isinstance(value, int | float | str) else float("nan")
    except (ValueError, OverflowError):
        return float("nan")
