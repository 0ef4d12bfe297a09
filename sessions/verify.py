"""The integrity of a session: the database, every reference, every blob."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

from lockstep.sessions.errors import SessionError
from lockstep.sessions.format import blobs, codec
from lockstep.sessions.format.archive import Archive
from lockstep.sessions.limits import DEFAULT, ReadLimits, tensor_bytes
from lockstep.sessions.session import Session

_MOST_PROBLEMS = 100
#: Tensors that are read of one state of the file.
_TOGETHER = 200

#: Rows that refer to what is not there, by what they are.
_DANGLING = {
    "sequences of no step (branch, step)": (
        "SELECT q.branch, q.step FROM sequences q LEFT JOIN steps s ON s.branch = q.branch AND s.step = q.step"
        " WHERE s.step IS NULL LIMIT 100"
    ),
    "statistics or checksums of no step (branch, step)": (
        "SELECT r.branch, r.step FROM recent r LEFT JOIN steps s ON s.branch = r.branch AND s.step = r.step"
        " WHERE s.step IS NULL LIMIT 100"
    ),
    "chunks of no step (id, branch, first step)": (
        "SELECT c.id, c.branch, c.first_step FROM chunks c LEFT JOIN steps s ON s.branch = c.branch"
        " AND s.step = c.first_step WHERE s.step IS NULL LIMIT 100"
    ),
    "columns of no chunk (chunk, tap)": (
        "SELECT k.chunk, k.tap FROM columns k LEFT JOIN chunks c ON c.id = k.chunk WHERE c.id IS NULL LIMIT 100"
    ),
    "tensors of no step (branch, step)": (
        "SELECT DISTINCT t.branch, t.step FROM tensors t LEFT JOIN steps s ON s.branch = t.branch AND s.step = t.step"
        " WHERE s.step IS NULL LIMIT 100"
    ),
    "tensors of no blob (branch, step, blob)": (
        "SELECT t.branch, t.step, t.blob FROM tensors t LEFT JOIN blobs b ON b.id = t.blob"
        " WHERE b.id IS NULL LIMIT 100"
    ),
    "events of no branch (id, branch)": (
        "SELECT e.id, e.branch FROM events e LEFT JOIN branches b ON b.id = e.branch WHERE b.id IS NULL LIMIT 100"
    ),
    "verdicts of no branch (branch, step, tap)": (
        "SELECT v.branch, v.step, v.tap FROM verdicts v LEFT JOIN branches b ON b.id = v.branch"
        " WHERE b.id IS NULL LIMIT 100"
    ),
}


def verify(path: Path, limits: ReadLimits = DEFAULT) -> list[str]:
    """All that is wrong with a session, one line each (at most 100); empty: nothing. What `limits` leave no room or
    time for is a line too.

    Checks SQLite's own structure, that steps are continuous, that each reference leads somewhere, that
    every array decompresses to the size it must have, and that every tensor still has its content hash.
    """
    path = Path(path)
    try:
        with Session.open(path, limits) as session, session.walk():
            archive = Archive(path, session.meter)
            try:
                parts = _structure(archive, session), _records(session), _blobs(archive)
                problems = itertools.chain(session.losses, session.meta_problems, *map(_guarded, parts))
                return list(itertools.islice(dict.fromkeys(problems), _MOST_PROBLEMS))
            finally:
                archive.close()
    except SessionError as error:
        return [str(error)]


def _guarded(problems: Iterator[str]) -> Iterator[str]:
    """The problems, up to one that ends the search for more of them."""
    try:
        yield from problems
    except SessionError as error:
        yield str(error)


def _structure(archive: Archive, session: Session) -> Iterator[str]:
    flight = session.in_flight()
    under_way = None if flight is None else (flight[0], flight[1].step)  # its tensors have no step yet
    checks = {"database": f"PRAGMA integrity_check({_MOST_PROBLEMS})"} | _DANGLING
    for what, sql in checks.items():
        try:
            found = archive.query(sql, what=what)
        except SessionError as error:
            yield str(error)
            continue
        for row in found:
            if row not in (("ok",), under_way):
                yield f"{what}: {row[0] if len(row) == 1 else row}"


def _records(session: Session) -> Iterator[str]:
    """Read everything once through the public interface."""
    for branch in session.branches():
        for step in session.own_steps(branch.id):
            for read in (session.step, session.stats, session.checksums, session.captured):
                try:
                    read(step, branch.id)
                except SessionError as error:
                    session.meter.check_time()
                    yield str(error)
    for journal in (session.events, session.verdicts):
        try:
            journal()
        except SessionError as error:
            yield str(error)
    yield from session.losses  # also what reading the steps brought to light


def _blobs(archive: Archive) -> Iterator[str]:
    """Every tensor's bytes against its hash, one at a time: they are the bulk of a session."""
    last = -(2**63)
    while found := archive.query(f"SELECT id FROM blobs WHERE id > ? ORDER BY id LIMIT {_TOGETHER}", last):
        with archive.snapshot():  # else each query looks whether the file has grown
            problems = [problem for (identity,) in found if (problem := _blob(archive, identity))]
        yield from problems
        last = found[-1][0]


def _blob(archive: Archive, identity: int) -> str:
    """What is wrong with a tensor's bytes; "" for nothing."""
    where = f"blob {identity}"
    try:
        name, dtype, shape, data = archive.one(
            "SELECT hash, dtype, shape, data FROM blobs WHERE id = ?", identity
        )
        kind, dims = blobs.parse_shape(shape, dtype, where)
        archive.meter.room(tensor_bytes(math.prod(dims), kind.itemsize), where)
        if blobs.tensor_hash(codec.decode(data, kind, dims, where), dtype) != name:
            return f"{where}: its content does not have its hash"
    except SessionError as error:
        archive.meter.check_time()
        return str(error)
    return ""
