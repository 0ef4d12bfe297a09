"""What the ranks hold of the weights, as `info weights` left it in the session, by branch."""

from __future__ import annotations

from dataclasses import dataclass

from sessions.records import STATISTICS
from sessions.text import clean
from workbench.tui.snapshots.overview import Where
from workbench.tui.snapshots.source import Source

#: The most rows that are believed of a foreign session.
_MOST = 200_000
_COLUMNS = 6 + len(STATISTICS)
_RMS, _ABSMAX, _ZEROS = (4 + STATISTICS.index(name) for name in ("rms", "absmax", "zeros"))


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


def held(source: Source, where: Where) -> dict[str, dict[int, Held]]:
    """By parameter and rank; empty where nobody has looked on this branch."""
    known = source.meta.get("weights")
    rows = known.get(str(where.branch)) if isinstance(known, dict) else None
    found: dict[str, dict[int, Held]] = {}
    for row in rows[:_MOST] if isinstance(rows, list) else ():
        if isinstance(row, list) and len(row) == _COLUMNS and type(row[1]) is int:
            share = _held(row)
            found.setdefault(clean(str(row[0]), limit=120), {})[share.rank] = share
    return found


def _held(row: list[object]) -> Held:
    shape = clean(str(row[2]), limit=40)
    count = 1
    for size in shape.split("×"):
        count *= int(size) if size.isdecimal() else 1
    return Held(
        rank=int(str(row[1])),
        shape=shape,
        rms=_number(row[_RMS]),
        absmax=_number(row[_ABSMAX]),
        checksum=clean(str(row[-2]), limit=16),
        checkpoint=clean(str(row[-1]), limit=12),
        empty=_number(row[_ZEROS]) == count,
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
