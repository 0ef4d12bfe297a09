"""The captured tensors of a step, found and decoded."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

from sessions.errors import damaged
from sessions.format import blobs, codec, read_rows
from sessions.format.archive import Archive
from sessions.format.rows import Row
from sessions.format.schema import PROTECTED_SINCE
from sessions.limits import RECORD_BYTES, Charged, tensor_bytes
from sessions.records import Tap, TensorKey, TensorRecord

_OF_STEP = "WHERE branch = ? AND step = ?"

_ByPlace = Mapping[tuple[object, ...], list[Row]]


class StepTensors:
    """The rows of the tensors of one step, kept for the next question: whoever asks for one asks for its neighbours.

    They are read together, because only then is one that is missing found.
    """

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self._kept: tuple[object, _ByPlace, Charged[Row]] | None = None
        archive.meter.register(self)

    def forget(self) -> None:
        """Let go of the rows kept."""
        self._kept = None

    def by_place(self, owner: int, step: int, where: str) -> _ByPlace:
        """The rows by (tap, sequence, rank). Inside a snapshot."""
        key, kept = (self.archive.state(), owner, step), self._kept
        if kept is not None and kept[0] == key:
            return kept[1]
        self._kept = kept = None  # not two at a time
        found = _rows(self.archive, owner, step, where)
        self.archive.meter.room(found.nbytes, f"the list of {where}")
        places: dict[tuple[object, ...], list[Row]] = {}
        for row in found:
            places.setdefault(row[2:5], []).append(row)
        self._kept = key, places, found
        return places


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
    known: StepTensors, tap: Tap, owner: int, step: int, rank: int, seq: int, part: str | None
) -> TensorRecord | None:
    """One captured tensor; `part` None: the whole ("" sorts first) if there is one, else any part."""
    archive, where = known.archive, f"tensor {tap.name[:80]!r} of step {step} of branch {owner}, rank {rank}"
    with archive.snapshot():
        place = (tap.index, seq, rank)
        found = [row for row in known.by_place(owner, step, where).get(place, ()) if part in (None, row[5])]
        if not found:
            return None
        *_, slice_, blob = min(found, key=lambda row: str(row[5]))
        heads = archive.rows("blobs", "WHERE id = ?", blob, where=where)
        contents = archive.query("SELECT data FROM blobs WHERE id = ?", blob, what=where)
    if len(heads) != 1 or len(contents) != 1:
        raise damaged(where, f"its content {blob} is missing")
    _, name, dtype, shape = heads[0]
    kind, dims = blobs.parse_shape(shape, dtype, where)
    archive.meter.room(tensor_bytes(math.prod(dims), kind.itemsize), where)
    array = codec.decode(contents[0][0], kind, dims, where)
    archive.meter.keep_array(array)
    if blobs.tensor_hash(array, dtype) != name:
        raise damaged(where, "its content does not have its hash")
    return TensorRecord(tap.name, rank, seq, array, dtype, read_rows.text(slice_, where))


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
