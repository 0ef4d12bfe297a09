"""The checksum of a row: the one way that rows are written, and the one way that they are read.

`Archive.rows` reads with it, `insert` and `update` write with it; see `sessions.format.schema` for what it covers.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from lockstep.sessions.errors import SessionDamaged, damaged
from lockstep.sessions.format.schema import ADDED, COLUMNS, COUNTED, PROTECTED_SINCE

Row = tuple[Any, ...]

_encode: Final = msgspec.msgpack.Encoder().encode

#: Damaged rows of one query that are reported one by one; further ones are as good as missing.
MOST_DAMAGED = 1000

#: How a message names a row.
_PLACES: Final = {
    "meta": "meta {key!r}",
    "taps": "tap {id}",
    "branches": "branch {id}",
    "steps": "step {step} of branch {branch}",
    "sequences": "step {step} of branch {branch}, sequence {seq}",
    "recent": "step {step} of branch {branch}, statistics or checksums",
    "chunks": "statistics or checksums of the steps {first_step} to {last_step} of branch {branch}",
    "columns": "chunk {chunk}, tap {tap}",
    "blobs": "tensor content {id}",
    "tensors": "tensor of tap {tap} on rank {rank}, step {step} of branch {branch}, sequence {seq}",
    "events": "event {id}",
    "verdicts": "verdict on {tap!r}, step {step} of branch {branch}",
    "in_flight": "step in flight {step} of branch {branch}",
    "totals": "number of rows of {name!r}",
}


def checksum(table: str, values: Sequence[Any]) -> int:
    """CRC-32 of the table's name and the values of COLUMNS as msgpack, less 2^31: a signed number of four bytes.

    Values must be as SQLite gives them back: a float where the column is REAL, an int for a bool.
    """
    return zlib.crc32(_encode((table, *values))) - (1 << 31)


def select(table: str, version: int, *before: str) -> str:
    """SELECT … FROM `table`: its COLUMNS, None for those that the version lacks, and `crc` where it has one. `before`
    them columns that no checksum covers."""
    columns = COLUMNS[table]
    if version >= PROTECTED_SINCE:
        return f"SELECT {', '.join((*before, *columns))}, crc FROM {table}"
    known = ("NULL" if name in ADDED else name for name in columns)
    return f"SELECT {', '.join((*before, *known))} FROM {table}"


def sift(
    table: str, found: Sequence[Row], version: int, where: str = ""
) -> tuple[list[Row], list[SessionDamaged]]:
    """The rows of `select` whose checksum matches, without it; and an error for each other one (the first
    MOST_DAMAGED), which names `where` or else the row's own place."""
    if version < PROTECTED_SINCE:
        return list(found), []
    good: list[Row] = []
    bad: list[SessionDamaged] = []
    for row in found:
        values = row[:-1]
        if zlib.crc32(_encode((table, *values))) - (1 << 31) == row[-1]:
            good.append(values)
        elif len(bad) < MOST_DAMAGED:
            bad.append(damaged(where or place(table, values), "its checksum does not match"))
    return good, bad


def place(table: str, values: Sequence[Any]) -> str:
    """Where a row belongs, as it states itself."""
    named = dict(zip(COLUMNS[table], (v if isinstance(v, int) else str(v)[:40] for v in values), strict=True))
    return _PLACES[table].format(**named)


# --- writing, inside a transaction -----------------------------------------------------------------------


def insert(db: sqlite3.Connection, table: str, values: Iterable[Row], *, replace: bool = False) -> None:
    """Write rows (the values of COLUMNS); `replace` those that have the same key. Keeps the table's total."""
    sealed = [(*row, checksum(table, row)) for row in values]
    before = _total(db, table) if replace and table in COUNTED else (0, 0)
    verb = "INSERT OR REPLACE" if replace else "INSERT"
    db.executemany(f"{verb} INTO {table} VALUES ({', '.join('?' * (len(COLUMNS[table]) + 1))})", sealed)
    if table in COUNTED:
        after = _total(db, table) if replace else (len(sealed), sum(row[-1] for row in sealed))
        _grow(db, table, after[0] - before[0], after[1] - before[1])


def several(db: sqlite3.Connection, table: str, clause: str, *arguments: object) -> list[Row]:
    """Rows that must be known before they are changed; `SessionError` where one is damaged."""
    found = db.execute(f"{select(table, PROTECTED_SINCE)} {clause}", arguments).fetchall()
    good, bad = sift(table, found, PROTECTED_SINCE)
    if bad:
        raise bad[0]
    return good


def next_id(db: sqlite3.Connection, table: str) -> int:
    """The id that SQLite would give to the next row of `table`: its checksum needs to know."""
    return int(db.execute(f"SELECT coalesce(max(id), 0) + 1 FROM {table}").fetchone()[0])


def begin_totals(db: sqlite3.Connection) -> None:
    """The totals of a new file."""
    insert(db, "totals", [(table, 0, 0) for table in COUNTED])


def _total(db: sqlite3.Connection, table: str) -> tuple[int, int]:
    number, crcs = db.execute(f"SELECT count(*), sum(crc) FROM {table}").fetchone()
    return number, crcs or 0


def _grow(db: sqlite3.Connection, table: str, number: int, crcs: int) -> None:
    found = several(db, "totals", "WHERE name = ?", table)
    if not found:
        raise damaged(place("totals", (table, 0, 0)), "it is missing")
    _, before, sum_before = found[0]
    insert(db, "totals", [(table, before + number, sum_before + crcs)], replace=True)
