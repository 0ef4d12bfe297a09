"""Which sequences the steps have fed: those of a ragged batch come and go."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.sessions.format.archive import Archive
from lockstep.sessions.format.read_rows import integer

_FED = (
    "SELECT seq, min(step), max(step) FROM sequences WHERE branch = ? AND step >= ? AND step < ? GROUP BY seq"
)


def sequences(archive: Archive, segments: Sequence[tuple[int, int, int]], start: int) -> dict[int, range]:
    """From the first to the last step, `start` and later, that fed each sequence in the (owner, first, stop) of
    `segments`, by its number."""
    found: dict[int, range] = {}
    for owner, first, stop in segments:
        for row in archive.query(_FED, owner, max(first, start), stop, what="sequences"):
            seq, begin, last = (integer(value, "sequences") for value in row)
            found[seq] = range(found[seq].start if seq in found else begin, last + 1)
    return dict(sorted(found.items()))
