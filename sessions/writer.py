"""Recording a session: one commit a step, so that a kill loses at most the step in flight."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from lockstep.sessions.copy import write_copy
from lockstep.sessions.errors import SessionError, SessionWriteError
from lockstep.sessions.format import (
    chunks,
    database,
    files,
    flight,
    log_owner,
    mark,
    meta_table,
    rows,
    write_rows,
)
from lockstep.sessions.format.json_text import json_text
from lockstep.sessions.format.schema import CHUNK_STEPS, SCHEMA_VERSION
from lockstep.sessions.meta import SessionMeta
from lockstep.sessions.recording_file import RecordingFile
from lockstep.sessions.records import JSON, StepInFlight, StepRecord, Tap, TensorRecord, VerdictRecord
from lockstep.sessions.session import Session


class SessionWriter:
    """The one writer of a session file. Safe to call from several threads; each call is one commit.

    `SessionWriteError` when the file cannot grow (full disk, quota): what was committed before stays
    readable, and the caller may go on without recording, or try the same call again later. `ValueError`
    when a record contradicts the session.
    """

    def __init__(self, file: RecordingFile) -> None:
        """Use `create` or `reopen`."""
        self.path, self._file = file.path, file
        connection = self._connection
        self._lock = threading.RLock()
        self._closed, self._marked = False, False
        names = connection.execute("SELECT id, name FROM taps").fetchall()
        self._tap_index: dict[str, int] = {name: index for index, name in names}
        (ranks,) = connection.execute("SELECT value FROM meta WHERE key = 'ranks'").fetchone()
        self.ranks = int(json.loads(ranks))
        steps = connection.execute(
            "SELECT b.id, b.fork_step, (SELECT max(step) FROM steps WHERE branch = b.id) FROM branches b"
        ).fetchall()
        self._next_step: dict[int, int] = {
            branch: fork if last is None else last + 1 for branch, fork, last in steps
        }
        recent = connection.execute(
            "SELECT branch, kind, count(*) FROM recent GROUP BY branch, kind"
        ).fetchall()
        self._recent: dict[tuple[int, int], int] = {(branch, kind): count for branch, kind, count in recent}

    @property
    def _connection(self) -> sqlite3.Connection:
        return self._file.connection

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        taps: Sequence[Tap],
        ranks: int,
        meta: SessionMeta,
        overwrite: bool = False,
    ) -> SessionWriter:
        """A new session at `path` with the branch 0, "main" (its rules from `meta.rules`).

        `taps` in execution order, indices from 0. `FileExistsError` if there is something by that name,
        unless `overwrite`; `SessionBusy` if it is being recorded.
        """
        path = Path(path)
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1, not {ranks}")
        first: dict[str, list[rows.Row]] = {
            "taps": write_rows.tap_rows(taps),
            "meta": [*meta_table.rows_of(meta), ("ranks", json_text(ranks)), mark.marked()],
            "branches": [(0, "main", None, 0, json_text(meta.rules))],
        }
        try:
            return cls._on(RecordingFile.create(path, first, overwrite=overwrite))
        except FileExistsError:
            raise
        except (*database.ERRORS, OSError) as error:
            raise database.unwritable(path, error) from error

    @classmethod
    def reopen(cls, path: Path) -> SessionWriter:
        """Continue a session of this format version; what a killed writer left in its log is recovered first.
        `SessionBusy` if somebody else is recording it."""
        path = Path(path)
        with Session.open(path) as session:  # what does not read back must not be written on
            version, losses = session.version, session.losses
        if version != SCHEMA_VERSION:
            raise SessionError(
                f"{path} has session format {version}, this Lockstep writes {SCHEMA_VERSION}: "
                "it can be read and replayed, not recorded on. Record a new session."
            )
        if losses:
            raise SessionError(
                f"{path} can be read, not recorded on: `lockstep sessions copy --salvage` makes a session of what can "
                f"be read. It is {losses[0]}"
            )
        try:
            return cls._on(RecordingFile.reopen(path))
        except (*database.ERRORS, OSError) as error:
            raise database.unwritable(path, error) from error

    @classmethod
    def _on(cls, file: RecordingFile) -> SessionWriter:
        try:
            writer = cls(file)
            if file.set_aside is not None:
                with writer._commit():  # notes it
                    pass
            return writer
        except BaseException:
            file.close()
            raise

    @property
    def set_aside(self) -> Path | None:
        """The new name of a log that lay beside the file and was another's; None where there was none."""
        return self._file.set_aside

    def branch(
        self,
        name: str,
        *,
        parent: int | None = None,
        fork_step: int = 0,
        rules: Mapping[str, str] | None = None,
    ) -> int:
        """A new branch that shares `parent`'s steps before `fork_step` and goes on there. Returns its id."""
        there = 0 if parent is None else self.next_step(parent)
        if not 0 <= fork_step <= there:
            raise ValueError(f"cannot fork at step {fork_step}: branch {parent} has the steps before {there}")
        with self._commit() as db:
            branch = rows.next_id(db, "branches")
            row = (branch, write_rows.utf8(name), parent, fork_step, json_text(dict(rules or {})))
            rows.insert(db, "branches", [row])
        self._next_step[branch] = fork_step
        return branch

    def next_step(self, branch: int) -> int:
        """The number of the branch's next step."""
        if branch not in self._next_step:
            raise ValueError(f"the session has no branch {branch}; it has {sorted(self._next_step)}")
        return self._next_step[branch]

    def step(self, branch: int, record: StepRecord, *, added: bool = False) -> None:
        """Record one step, which must be the branch's next. One commit; all of it or nothing is kept. `added`: to the
        tensors that it had while it was in flight, else in place of them."""
        with self._lock:
            if record.step != self.next_step(branch):
                raise ValueError(
                    f"step {record.step} does not follow: branch {branch} goes on with step "
                    f"{self.next_step(branch)}"
                )
            if len({one.seq for one in record.sequences}) != len(record.sequences):
                raise ValueError(f"step {record.step} has two records of one sequence")
            arrays = write_rows.step_arrays(record, len(self._tap_index), self.ranks)
            sequences = [
                write_rows.sequence_row(branch, record.step, one, self.ranks) for one in record.sequences
            ]
            counts = {kind: self._recent.get((branch, kind), 0) + 1 for kind in arrays}
            with self._commit() as db:
                before = flight.tensors_of(db, branch, record.step) if added else None
                flight.clear(db, tensors=before is None)
                captured = (before or 0) + self._insert_tensors(branch, record.step, record.tensors)
                rows.insert(db, "steps", [write_rows.step_row(branch, record, arrays, captured)])
                rows.insert(db, "sequences", sequences)
                for kind, data in arrays.items():
                    rows.insert(db, "recent", [(branch, kind, record.step, data)])
                    if counts[kind] >= CHUNK_STEPS:
                        chunks.to_columns(db, branch, kind, len(self._tap_index), self.ranks)
                        counts[kind] -= CHUNK_STEPS
            self._next_step[branch] = record.step + 1
            self._recent.update({(branch, kind): count for kind, count in counts.items()})

    def in_flight(self, branch: int, record: StepInFlight) -> None:
        """Show how far the branch's next step has come, in place of what was shown before: the tensors are added to
        those. `step` replaces all of it, `abandon_flight` takes it back."""
        arrays = write_rows.step_arrays(record, len(self._tap_index), self.ranks)
        with self._lock:
            if record.step != self.next_step(branch):
                raise ValueError(f"step {record.step} is not the next of branch {branch}")
            with self._commit() as db:
                before = flight.tensors_of(db, branch, record.step)
                if before is None:
                    flight.clear(db)
                more = self._insert_tensors(branch, record.step, record.tensors)
                flight.write(db, branch, record, arrays, (before or 0) + more)

    def abandon_flight(self) -> None:
        """The step in flight was broken off."""
        with self._commit() as db:
            flight.clear(db)

    def tensors(
        self, branch: int, step: int, tensors: Iterable[TensorRecord], *, dropped: Sequence[str] = ()
    ) -> None:
        """Add tensors to a step already recorded on this very branch, or to that in flight: captured on demand."""
        with self._commit() as db:
            shown = flight.tensors_of(db, branch, step)
            if shown is not None:
                flight.recount(db, branch, shown + self._insert_tensors(branch, step, tensors))
                return
            found = rows.several(db, "steps", "WHERE branch = ? AND step = ?", branch, step)
            if not found:
                raise ValueError(f"branch {branch} has no step {step} of its own")
            *head, words, arrays, sequences, captured = found[0]
            captured += self._insert_tensors(branch, step, tensors)
            words = json_text([*json.loads(words), *dropped])
            rows.insert(db, "steps", [(*head, words, arrays, sequences, captured)], replace=True)

    def event(self, branch: int, step: int, kind: str, text: str, data: JSON = None) -> int:
        """Append to the journal; returns the event's id."""
        row = (branch, step, kind, write_rows.utf8(text), json_text(data))
        with self._commit() as db:
            event = rows.next_id(db, "events")
            rows.insert(db, "events", [(event, *row)])
        return event

    def verdicts(self, verdicts: Iterable[VerdictRecord]) -> None:
        """Record judgements; the newest of a tap at a step replaces an older one."""
        judged = [(v.branch, v.step, v.tap, v.verdict, json_text(v.detail)) for v in verdicts]
        with self._commit() as db:
            rows.insert(db, "verdicts", judged, replace=True)

    def set_meta(self, **fields: object) -> None:
        """Replace fields of the session's meta. `ValueError` where one does not validate."""
        self._put_meta([meta_table.row(name, value) for name, value in fields.items()])

    def token_texts(self, page: int, texts: Mapping[int, str]) -> None:
        """Write (or write again) one page of token texts; together the pages are `meta.token_texts`."""
        self._put_meta([meta_table.page_row(page, texts)])

    def _put_meta(self, fields: Sequence[tuple[str, str]]) -> None:
        with self._commit() as db:
            rows.insert(db, "meta", fields, replace=True)

    def continued_at(self, path: Path) -> SessionWriter:
        """A writer of a new file at `path` that has all that was committed here, also where this file was taken away.
        Close this one then. `FileExistsError` where there is something by that name."""
        with self._lock:
            write_copy(self._connection, path)
            return SessionWriter.reopen(path)

    def close(self) -> None:
        """Fold the log into the file, so that one file is left (once the last reader has gone too)."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._file.close()
            except sqlite3.Error as error:
                log = files.wal_of(self.path)
                if not files.exists(log):
                    raise SessionWriteError(
                        f"{self.path} has all that was recorded, but could not be marked as complete ({error}): "
                        "`lockstep sessions copy --salvage` makes a whole one where there is room."
                    ) from error
                raise SessionWriteError(
                    f"{self.path} is complete, but its newest steps are still in {log.name} ({error}). Keep both "
                    "files together; with room on the disk, opening it for writing joins them."
                ) from error

    def __enter__(self) -> SessionWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _insert_tensors(self, branch: int, step: int, tensors: Iterable[TensorRecord]) -> int:
        """By how many tensors the step has more."""
        return write_rows.insert_tensors(
            self._connection, branch, step, list(tensors), self._tap_index, self.ranks
        )

    @contextmanager
    def _commit(self) -> Iterator[sqlite3.Connection]:
        """One transaction: committed as a whole, or rolled back as a whole."""
        with self._lock:
            if self._closed:
                raise SessionWriteError(f"{self.path} has been closed; reopen it to record on.")
            try:
                self._file.check_in_place()
                self._connection.execute("BEGIN IMMEDIATE")
                log_owner.show(self._connection)
                if not self._marked:
                    mark.write(self._connection)
                self._file.note_set_aside(max(0, self._next_step.get(0, 0) - 1))
                yield self._connection
                self._connection.execute("COMMIT")
                self._marked = True
                database.shorten_log(self._connection, self.path)
            except BaseException as error:
                if self._connection.in_transaction:  # SQLite has rolled back by itself when the disk is full
                    self._connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise database.unwritable(self.path, error) from error
                raise
