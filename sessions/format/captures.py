"""The captured tensors of a step, found and decoded."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from lockstep.sessions.errors import damaged
from lockstep.sessions.format import blobs, codec, read_rows, rows
from lockstep.sessions.format.archive import Archive
from lockstep.sessions.format.rows import Row
from lockstep.sessions.format.schema import PROTECTED_SINCE
from lockstep.sessions.limits import RECORD_BYTES, Charged, tensor_bytes
from lockstep.sessions.recently_used import RecentlyUsed
from lockstep.sessions.records import StepRecord, Tap, TensorKey, TensorRecord

_OF_STEP = "WHERE branch = ? AND step = ?"

#: Bytes of the lists of steps' tensors that are kept, and of a step's contents that are read with its list where all
#: are to be kept: those of a decode step of some 500 taps in float64.
_LIST_BYTES, _CONTENT_BYTES = 4 << 20, 16 << 20


@dataclass(frozen=True, slots=True)
class _StepRows:
    """The rows of a step's tensors by (tap, sequence, rank), and of their contents as stored, by number, those that
    were read with them. Charged lists count as long as they live."""

    places: Mapping[tuple[object, ...], list[Row]]
    stored: Mapping[object, Row]
    charged: tuple[Charged[Row], Charged[Row]]

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.charged)


class KeptSteps:
    """What was read of a step, kept for the next question: whoever asks for one tensor asks for its neighbours.

    The rows of a step are read together, because only then is one that is missing found.
    """

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self._state: object = None  # of the file when the lists were read
        self._lists = RecentlyUsed[_StepRows](_LIST_BYTES)
        self._contents: RecentlyUsed[tuple[NDArray[Any], str]] | None = None
        self._records = RecentlyUsed[StepRecord](0)
        archive.meter.register(self)

    def forget(self) -> None:
        """Let go of all that is kept."""
        self._lists.clear()
        self._records.clear()
        if self._contents is not None:
            self._contents.clear()

    @contextmanager
    def keeping(self, nbytes: int) -> Iterator[None]:
        """Inside, tensors and steps are decoded once as long as `nbytes` suffice; the file is not looked at anew."""
        if self._contents is not None:
            yield
            return
        before, few = self._lists, max(nbytes // 8, _LIST_BYTES)
        self._lists, self._records = RecentlyUsed(few), RecentlyUsed(few)
        self._contents = RecentlyUsed(nbytes)
        try:
            yield
        finally:
            self._lists, self._contents = before, None
            self._records.clear()

    def snapshot(self) -> AbstractContextManager[None]:
        """One state of the file; while tensors are kept, that which they were read from."""
        return self.archive.snapshot() if self._contents is None else self.archive.meter.view()

    def record(self, owner: int, step: int, read: Callable[[int, int], StepRecord]) -> StepRecord:
        """What `read` gives for that step; kept while tensors are."""
        kept = self._records.get((owner, step))
        if kept is None:
            kept = read(owner, step)
            if self._contents is not None:
                self._records.put((owner, step), kept, read_rows.record_bytes(kept))
        return kept

    def of_step(self, owner: int, step: int, where: str) -> _StepRows:
        """The rows of the step's tensors. Inside a snapshot."""
        if self._contents is None:
            self._look()
        kept = self._lists.get((owner, step))
        if kept is None:
            found = _rows(self.archive, owner, step, where)
            self.archive.meter.room(found.nbytes, f"the list of {where}")
            places: dict[tuple[object, ...], list[Row]] = {}
            for row in found:
                places.setdefault(row[2:5], []).append(row)
            stored = self._stored(owner, step, where)
            kept = _StepRows(places, {row[1]: row for row in stored}, (found, stored))
            self._lists.put((owner, step), kept, kept.nbytes)
        return kept

    def content(self, rows: _StepRows, blob: object, where: str) -> tuple[NDArray[Any], str]:
        """A tensor by the number of its blob, and its dtype; read-only where it is kept. Inside a snapshot."""
        contents = self._contents
        kept = None if contents is None else contents.get(blob)
        if kept is None:
            found = (
                [rows.stored[blob]] if blob in rows.stored else _stored(self.archive, "= ?", blob, what=where)
            )
            kept = array, _ = _decoded(self.archive, found, blob, where)
            if contents is not None:
                array.setflags(write=False)
                contents.put(blob, kept, array.nbytes)
        return kept

    def _stored(self, owner: int, step: int, where: str) -> Charged[Row]:
        """The contents of a step as stored, where all of them are to be kept and are small: then one query is far
        cheaper than one for each."""
        of_step = f"IN (SELECT blob FROM tensors {_OF_STEP})"
        if self._contents is not None:
            (nbytes,) = self.archive.one(
                f"SELECT sum(length(data)) FROM blobs WHERE id {of_step}", owner, step
            )
            if (nbytes or 0) <= min(_CONTENT_BYTES, self.archive.meter.limits.memory // 16):
                return _stored(self.archive, of_step, owner, step, what=where)
        return self.archive.meter.charged((), 0)

    def _look(self) -> None:
        """Forget the lists if anything was written since."""
        if (state := self.archive.state()) != self._state:
            self._lists.clear()
            self._state = state


def keys(archive: Archive, taps: Sequence[Tap], ranks: int, owner: int, step: int) -> list[TensorKey]:
    """What was captured at a step of the branch `owner`, in execution order."""
    where = f"tensors of step {step} of branch {owner}"
    with archive.snapshot():
        found = _rows(archive, owner, step, where)
        contents = f"WHERE id IN (SELECT blob FROM tensors {_OF_STEP})"
        heads = {row[0]: row for row in archive.rows("blobs", contents, owner, step, where=where)}
    if missing := [blob for *_, blob in found if blob not in heads]:
        raise damaged(where, f"the content {missing[0]} of one is missing")
    nbytes = RECORD_BYTES * len(found)
    archive.meter.room(nbytes, f"the list of {where}")
    ordered = sorted(found, key=lambda row: (*row[2:5], str(row[5])))
    keys = (
        read_rows.tensor_key(step, (tap, rank, seq, part, *heads[blob][2:]), taps, ranks)
        for _, _, tap, seq, rank, part, blob in ordered
    )
    return archive.meter.charged(keys, nbytes)


def ever(archive: Archive, taps: Sequence[Tap], segments: Sequence[tuple[int, int, int]]) -> set[str]:
    """The taps of which any tensor was captured in the (owner, first, stop) of `segments`."""
    known, within = {tap.index: tap.name for tap in taps}, "WHERE branch = ? AND step >= ? AND step < ?"
    found: set[int] = set()
    for segment in segments:
        with archive.snapshot():
            rows = archive.rows("tensors", within, *segment)
            if archive.version >= PROTECTED_SINCE:
                (number,) = archive.one(f"SELECT sum(tensors) FROM steps {within}", *segment)
                if len(set(rows)) != (number or 0):
                    where = f"tensors of the steps {segment[1]} to {segment[2] - 1} of branch {segment[0]}"
                    raise damaged(where, f"{len(set(rows))} of {number} are there")
        found.update(row[2] for row in rows)
    return {known[tap] for tap in found if tap in known}


def stored(
    archive: Archive, tap: Tap, segments: Sequence[tuple[int, int, int]], steps: range, seq: int
) -> dict[int, Hashable]:
    """What was captured of a tap at those of `steps` that lie in the segments (owner, first, stop): (rank, slice, blob)
    of each part by step. Blobs never change: equal parts are equal bits."""
    found: dict[int, list[tuple[int, str, int]]] = {}
    for owner, first, stop in segments:
        if first >= steps.stop or steps.start >= stop:
            continue
        for _, step, _, _, rank, slice_, blob in archive.rows(
            "tensors",
            "WHERE branch = ? AND step >= ? AND step < ? AND tap = ? AND seq = ? ORDER BY step, rank, slice",
            *(owner, max(first, steps.start), min(stop, steps.stop), tap.index, seq),
        ):
            found.setdefault(step, []).append((rank, read_rows.text(slice_, "tensors"), blob))
    return {step: tuple(parts) for step, parts in found.items()}


def one(
    known: KeptSteps, tap: Tap, owner: int, step: int, rank: int, seq: int, part: str | None
) -> TensorRecord | None:
    """One captured tensor; `part` None: the whole ("" sorts first) if there is one, else any part."""
    where = f"tensor {tap.name[:80]!r} of step {step} of branch {owner}, rank {rank}"
    with known.snapshot():
        rows = known.of_step(owner, step, where)
        found = [row for row in rows.places.get((tap.index, seq, rank), ()) if part in (None, row[5])]
        if not found:
            return None
        *_, slice_, blob = min(found, key=lambda row: str(row[5]))
        array, dtype = known.content(rows, blob, where)
    return TensorRecord(tap.name, rank, seq, array, dtype, read_rows.text(slice_, where))


def _stored(archive: Archive, which: str, *arguments: object, what: str) -> Charged[Row]:
    """Rows of `blobs` with their data before them, unchecked."""
    sql = f"{rows.select('blobs', archive.version, 'data')} WHERE id {which}"
    return archive.query(sql, *arguments, what=what)


def _decoded(archive: Archive, found: Sequence[Row], blob: object, where: str) -> tuple[NDArray[Any], str]:
    heads, bad = rows.sift("blobs", [row[1:] for row in found], archive.version, where)
    if bad:
        raise bad[0]
    if len(heads) != 1:
        raise damaged(where, f"its content {blob} is missing")
    _, name, dtype, shape = heads[0]
    kind, dims = blobs.parse_shape(shape, dtype, where)
    archive.meter.room(tensor_bytes(math.prod(dims), kind.itemsize), where)
    array = codec.decode(found[0][0], kind, dims, where)
    archive.meter.keep_array(array)
    if blobs.tensor_hash(array, dtype) != name:
        raise damaged(where, "its content does not have its hash")
    return array, dtype


def _rows(archive: Archive, owner: int, step: int, where: str) -> Charged[Row]:
    found = archive.rows("tensors", _OF_STEP, owner, step, where=where)
    heads = archive.rows("steps", _OF_STEP, owner, step, where=where)
    heads = heads or archive.rows("in_flight", _OF_STEP, owner, step, where=where)
    if not heads:
        raise damaged(where, "the row of the step is missing")
    number = heads[0][-1]
    if number not in (None, len(set(found))):
        raise damaged(where, f"{len(set(found))} of {number} tensors are there")
    return found
