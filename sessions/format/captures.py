"""The captured tensors of a step, found and decoded."""

from __future__ import annotations

from collections.abc import Sequence

from sessions.format import blobs, codec, read_rows
from sessions.format.archive import Archive
from sessions.records import Tap, TensorKey, TensorRecord


def keys(archive: Archive, taps: Sequence[Tap], ranks: int, owner: int, step: int) -> list[TensorKey]:
    """What was captured at a step of the branch `owner`, in execution order."""
    found = archive.query(
        "SELECT t.tap, t.rank, t.seq, t.slice, b.dtype, b.shape FROM tensors t"
        " JOIN blobs b ON b.id = t.blob WHERE t.branch = ? AND t.step = ?"
        " ORDER BY t.tap, t.seq, t.rank, t.slice",
        *(owner, step),
    )
    return [read_rows.tensor_key(step, row, taps, ranks) for row in found]


def stored(
    archive: Archive, tap: Tap, owner: int, first: int, stop: int, seq: int
) -> dict[int, tuple[tuple[int, str, int], ...]]:
    """What was captured of a tap at the steps from `first` to before `stop` of the branch `owner`: (rank, slice, blob)
    of each part by step. Blobs never change: equal parts are equal bits."""
    found: dict[int, list[tuple[int, str, int]]] = {}
    for step, rank, slice_, blob in archive.query(
        "SELECT step, rank, slice, blob FROM tensors WHERE branch = ? AND step >= ? AND step < ?"
        " AND tap = ? AND seq = ? ORDER BY step, rank, slice",
        *(owner, first, stop, tap.index, seq),
    ):
        found.setdefault(step, []).append((rank, read_rows.text(slice_, "tensors"), blob))
    return {step: tuple(parts) for step, parts in found.items()}


def one(
    archive: Archive, tap: Tap, owner: int, step: int, rank: int, seq: int, part: str | None
) -> TensorRecord | None:
    """One captured tensor; `part` None: the whole ("" sorts first) if there is one, else any part."""
    found = archive.query(
        "SELECT t.slice, b.dtype, b.shape, b.data FROM tensors t JOIN blobs b ON b.id = t.blob"
        " WHERE t.branch = ? AND t.step = ? AND t.tap = ? AND t.seq = ? AND t.rank = ?"
        " AND (? IS NULL OR t.slice = ?) ORDER BY t.slice LIMIT 1",
        *(owner, step, tap.index, seq, rank, part, part),
    )
    if not found:
        return None
    slice_, dtype, shape, data = found[0]
    where = f"tensor {tap.name[:80]!r} of step {step}, rank {rank}"
    kind, dims = blobs.parse_shape(shape, dtype, where)
    array = codec.decode(data, kind, dims, where)
    return TensorRecord(tap.name, rank, seq, array, dtype, read_rows.text(slice_, where))
