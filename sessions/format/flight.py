"""The step that has stopped in its middle: what has passed by now, until the record of the whole step replaces it.

There is one at most. Its tensors are rows of `tensors` like those of a step that is over.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec
from numpy.typing import NDArray

from lockstep.sessions.errors import broken
from lockstep.sessions.format import chunks, codec, read_rows, rows
from lockstep.sessions.format.archive import Archive
from lockstep.sessions.format.json_text import json_text, parse_json
from lockstep.sessions.format.schema import CHECKSUMS, PROTECTED_SINCE, STATS
from lockstep.sessions.records import SequenceStep, StepInFlight

_Reported = list[tuple[int, list[int], list[int]]]  # (sequence, ids, positions) each


def clear(db: sqlite3.Connection, *, tensors: bool = True) -> None:
    """Forget the step in flight, and its `tensors`. Inside a transaction."""
    for branch, step, *_ in rows.several(db, "in_flight", "") if tensors else ():
        db.execute("DELETE FROM tensors WHERE branch = ? AND step = ?", (branch, step))
    db.execute("DELETE FROM in_flight")


def tensors_of(db: sqlite3.Connection, branch: int, step: int) -> int | None:
    """How many tensors the step has, if it is the one in flight; None if it is not. Inside a transaction."""
    found = rows.several(db, "in_flight", "WHERE branch = ? AND step = ?", branch, step)
    return int(found[0][-1]) if found else None


def write(
    db: sqlite3.Connection, branch: int, flight: StepInFlight, arrays: dict[int, bytes], tensors: int
) -> None:
    """Write the step in flight, with so many tensors. Inside a transaction."""
    reported = [(one.seq, list(one.ids), list(one.positions)) for one in flight.sequences]
    row = (
        *(branch, flight.step, flight.place, json_text(reported)),
        *(arrays.get(STATS, b""), arrays.get(CHECKSUMS, b""), tensors),
    )
    rows.insert(db, "in_flight", [row], replace=True)


def recount(db: sqlite3.Connection, branch: int, tensors: int) -> None:
    """The step in flight has so many tensors now. Inside a transaction."""
    ((*head, _),) = rows.several(db, "in_flight", "WHERE branch = ?", branch)
    rows.insert(db, "in_flight", [(*head, tensors)], replace=True)


def read(archive: Archive, taps: int, ranks: int) -> tuple[int, StepInFlight] | None:
    """The branch and its step in flight, without tensors; None where there is none."""
    if archive.version < PROTECTED_SINCE:
        return None
    found = archive.rows("in_flight", "ORDER BY branch LIMIT 1")
    if not found:
        return None
    branch, step, place, sequences, stats, sums, _ = found[0]
    where = f"step in flight {str(step)[:20]}"
    if not 0 <= read_rows.integer(place, where) < taps:
        raise broken(where, f"it stands at no tap: {place}")
    try:
        reported = msgspec.convert(parse_json(sequences, where), _Reported)
    except msgspec.ValidationError as error:
        raise broken(where, f"its sequences: {error}") from error
    return read_rows.integer(branch, where), StepInFlight(
        step=read_rows.integer(step, where),
        place=place,
        sequences=[SequenceStep(seq, ids, positions, ()) for seq, ids, positions in reported],
        stats=_array(stats, STATS, taps, ranks, where),
        checksums=_array(sums, CHECKSUMS, taps, ranks, where),
    )


def _array(data: object, kind: int, taps: int, ranks: int, where: str) -> NDArray[Any] | None:
    shape: Sequence[int] = (taps, *chunks.row_shape(kind, ranks))
    return None if data == b"" else codec.decode(data, chunks.DTYPES[kind], shape, where)
