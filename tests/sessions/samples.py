"""Small deterministic sessions to write. Light: processes that are killed in the tests import it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.sessions import (
    STATISTICS,
    SequenceStep,
    SessionMeta,
    SessionWriter,
    StepRecord,
    Tap,
    TensorRecord,
)
from lockstep.sessions.format.rows import checksum
from lockstep.sessions.format.schema import ADDED, COLUMNS, COUNTED, TABLES

TAPS = (
    Tap(0, "embed", "replicate"),
    Tap(1, "layers.0.attn.q_proj", "shard(1)"),
    Tap(2, "layers.0.attn.o_proj.partial", "partial"),
)


def write(path: Path, steps: int, **options: Any) -> Path:
    """A finished session of `steps` steps on two ranks."""
    with create(path) as writer:
        for step in range(steps):
            writer.step(0, record(step, **options))
    return path


def create(path: Path, taps: tuple[Tap, ...] = TAPS, ranks: int = 2, **meta: Any) -> SessionWriter:
    return SessionWriter.create(path, taps=taps, ranks=ranks, meta=SessionMeta(**meta))


def tamper(path: Path, *statements: str, arguments: tuple[object, ...] = (), sealed: bool = True) -> Path:
    """Change the file as somebody with SQLite at hand would; `sealed`: who makes the checksums right again."""
    with closing(sqlite3.connect(path)) as connection, connection:
        before = _objects(connection)
        for statement in statements:
            connection.execute(statement, arguments)
        if sealed and _objects(connection) == before:
            seal(connection)
    return path


def _objects(connection: sqlite3.Connection) -> list[object]:
    return connection.execute("SELECT * FROM sqlite_master").fetchall()


def as_version(path: Path, version: int) -> Path:
    """Make of the session one of an earlier version: without checksums and totals."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for table in set(TABLES) - {"totals", "in_flight"}:
            for column in ("crc", *(ADDED if table == "steps" else ())):
                connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        connection.executescript("DROP TABLE totals; DROP TABLE in_flight")
        connection.execute(f"PRAGMA user_version = {version}")
    return path


def seal(connection: sqlite3.Connection) -> None:
    """Make every count, checksum and total that of the rows there are, as a forger would."""
    connection.create_function("row_crc", -1, lambda table, *row: checksum(table, row))
    of_step = "WHERE branch = steps.branch AND step = steps.step"
    for table in ("sequences", "tensors"):
        connection.execute(f"UPDATE steps SET {table} = (SELECT count(*) FROM {table} {of_step})")
    for kind in (0, 1):
        connection.execute(
            f"UPDATE steps SET arrays = arrays | {1 << kind} WHERE EXISTS (SELECT 1 FROM recent {of_step} AND"
            f" kind = {kind}) OR EXISTS (SELECT 1 FROM chunks WHERE branch = steps.branch AND kind = {kind}"
            " AND first_step <= steps.step AND last_step >= steps.step)"
        )
    for table, columns in COLUMNS.items():  # "totals" is the last
        with suppress(sqlite3.OperationalError):  # a text that is no UTF-8 cannot be sealed
            connection.execute(f"UPDATE {table} SET crc = row_crc('{table}', {', '.join(columns)})")
        if table in COUNTED:
            total = f"SELECT count(*), coalesce(sum(crc), 0) FROM {table}"
            connection.execute(f"UPDATE totals SET (number, crcs) = ({total}) WHERE name = '{table}'")


def put_meta(path: Path, **rows: object) -> None:
    """Write rows of the meta table as a stranger might: any key, any JSON."""
    for key, value in rows.items():
        tamper(path, "INSERT OR REPLACE INTO meta VALUES (?, ?, 0)", arguments=(key, json.dumps(value)))


def record(step: int, *, arrays: bool = True, tensors: bool = True, ranks: int = 2) -> StepRecord:
    """A step whose every number is a function of the step."""
    rng = np.random.default_rng(step)
    return StepRecord(
        step=step,
        phase="decode" if step else "prefill",
        sequences=[sequence(step, ranks=ranks)],
        wall_seconds=0.5,
        stats=rng.normal(size=(len(TAPS), ranks, len(STATISTICS))).astype(np.float32) if arrays else None,
        checksums=rng.integers(2**64, size=(len(TAPS), ranks), dtype=np.uint64) if arrays else None,
        tensors=[
            TensorRecord("embed", rank, 0, np.full((2, 3), step, np.float32), "float32")
            for rank in range(ranks)
        ]
        if tensors
        else [],
    )


def sequence(step: int, ids: tuple[int, ...] | None = None, ranks: int = 2) -> SequenceStep:
    lengths = ((step + 1,) * 3,) * ranks
    return SequenceStep(0, ids or (step,), (step,), lengths, tuple(range(step // 4 + 1)), emitted=step + 1)
