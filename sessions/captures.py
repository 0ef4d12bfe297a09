"""The captured tensors of a step, found and decoded."""

from __future__ import annotations

from collections.abc import Sequence

from sessions import codec, rows
from sessions.archive import Archive
from sessions.records import Tap, TensorKey, TensorRecord


def keys(archive: Archive, taps: Sequence[Tap], ranks: int, owner: int, step: int) -> list[TensorKey]:
    """What was captured at a step of the branch `owner`, in execution order."""
    found = archive.query(
        "SELECT t.tap, t.rank, t.seq, t.slice, b.dtype, b.shape FROM tensors t"
        " JOIN blobs b ON b.id = t.blob WHERE t.branch = ? AND t.step = ?"
        " ORDER BY t.tap, t.seq, t.rank, t.slice",
        *(owner, step),
    )
    return [rows.tensor_key(step, row, taps, ranks) for row in found]


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
    kind, dims = codec.parse_shape(shape, dtype, where)
    array = codec.unpack(data, kind, dims, where)
    return TensorRecord(tap.name, rank, seq, array, dtype, rows.text(slice_, where))
