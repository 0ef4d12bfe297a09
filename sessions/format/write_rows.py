"""Records as rows of the file: the inverse of `read_rows`."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Mapping, Sequence

from lockstep.sessions import dtypes, layouts
from lockstep.sessions.format import blobs, chunks, codec, rows
from lockstep.sessions.format.json_text import json_text
from lockstep.sessions.format.schema import CHECKSUMS, STATS
from lockstep.sessions.records import MAX_LAYERS, SequenceStep, StepInFlight, StepRecord, Tap, TensorRecord

#: Bytes of new blobs that are written together.
_TOGETHER = 1 << 20


def step_row(branch: int, record: StepRecord, arrays: Iterable[int], tensors: int) -> rows.Row:
    """A row of `steps`; `arrays` are the kinds that it has, `tensors` the number."""
    return (
        branch,
        record.step,
        record.phase,
        real(record.wall_seconds),
        record.free_blocks,
        record.used_blocks,
        json_text(list(record.dropped)),
        sum(1 << kind for kind in arrays),
        len(record.sequences),
        tensors,
    )


def sequence_row(branch: int, step: int, sequence: SequenceStep, ranks: int) -> rows.Row:
    """A row of `sequences`; `ValueError` when its cached lengths are not of that many ranks."""
    return (
        branch,
        step,
        sequence.seq,
        codec.encode_ints(sequence.ids),
        codec.encode_ints(sequence.positions),
        codec.encode_ints(_flat_lengths(step, sequence, ranks)),
        codec.encode_ints(sequence.block_table),
        sequence.emitted,
        int(sequence.forced),
        codec.encode_ints(sequence.topk_ids),
        codec.encode_floats(sequence.topk_logits),
        real(sequence.logsumexp),
        real(sequence.entropy),
    )


def _flat_lengths(step: int, sequence: SequenceStep, ranks: int) -> list[int]:
    """Cached lengths [ranks][layers], rank after rank. Every rank must have equally many layers: only then can its
    lengths be distinguished from the next one's when they are read back."""
    layers = {len(of_rank) for of_rank in sequence.kv_lens}
    if sequence.kv_lens and (
        len(sequence.kv_lens) != ranks or len(layers) > 1 or not 0 < max(layers) <= MAX_LAYERS
    ):
        shape = [len(of_rank) for of_rank in sequence.kv_lens][:16]
        raise ValueError(
            f"step {step}, sequence {sequence.seq}: kv_lens has {shape} layers a rank; this session has {ranks} ranks,"
            f" which must have equally many (1 to {MAX_LAYERS})"
        )
    return [rows for of_rank in sequence.kv_lens for rows in of_rank]


def step_arrays(record: StepRecord | StepInFlight, taps: int, ranks: int) -> dict[int, bytes]:
    """The step's compressed arrays by kind; `ValueError` when their shape is not the session's."""
    arrays: dict[int, bytes] = {}
    for kind, array in ((STATS, record.stats), (CHECKSUMS, record.checksums)):
        if array is None:
            continue
        expected = (taps, *chunks.row_shape(kind, ranks))
        if array.shape != expected or array.dtype != chunks.DTYPES[kind]:
            raise ValueError(
                f"{chunks.NAMES[kind]} of step {record.step} are {array.dtype}{array.shape}; "
                f"this session has {chunks.DTYPES[kind]}{expected}"
            )
        arrays[kind] = codec.encode(array)
    return arrays


def insert_tensors(
    connection: sqlite3.Connection,
    branch: int,
    step: int,
    tensors: Sequence[TensorRecord],
    tap_index: Mapping[str, int],
    ranks: int,
) -> int:
    """Write tensors, each content once; by how many the step has more. Inside a transaction."""
    if not tensors:
        return 0
    before = _tensors_of(connection, branch, step)
    contents = _Contents(connection)
    placed: list[rows.Row] = []
    for tensor in tensors:
        tap = tap_index.get(tensor.tap)
        if tap is None or not 0 <= tensor.rank < ranks:
            raise ValueError(f"the session knows no tap {tensor.tap!r} on rank {tensor.rank}")
        placed.append((branch, step, tap, tensor.seq, tensor.rank, tensor.slice, contents.blob(tensor)))
    contents.write()
    rows.insert(connection, "tensors", placed, replace=True)
    return _tensors_of(connection, branch, step) - before


def _tensors_of(connection: sqlite3.Connection, branch: int, step: int) -> int:
    counting = "SELECT count(*) FROM tensors WHERE branch = ? AND step = ?"
    return int(connection.execute(counting, (branch, step)).fetchone()[0])


class _Contents:
    """The blobs that a step adds: each content once, written a few at a time."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection, self._next = connection, rows.next_id(connection, "blobs")
        self._added: dict[bytes, int] = {}
        self._rows: list[rows.Row] = []
        self._bytes = 0

    def blob(self, tensor: TensorRecord) -> int:
        """The id of the blob with the tensor's content, a new one if there is none yet."""
        array = dtypes.stored(tensor.array, tensor.dtype)
        name = blobs.tensor_hash(array, tensor.dtype)
        if name in self._added:
            return self._added[name]
        row = self._connection.execute("SELECT id FROM blobs WHERE hash = ?", (name,)).fetchone()
        if row is not None:
            return int(row[0])
        head = (self._next, name, tensor.dtype, json.dumps(array.shape))
        data = codec.encode(array)
        self._added[name] = self._next
        self._next += 1
        self._rows.append((*head, rows.checksum("blobs", head), data))
        self._bytes += len(data)
        if self._bytes > _TOGETHER:
            self.write()
        return self._added[name]

    def write(self) -> None:
        """Write those that were not written yet."""
        columns = "id, hash, dtype, shape, crc, data"
        self._connection.executemany(f"INSERT INTO blobs ({columns}) VALUES (?, ?, ?, ?, ?, ?)", self._rows)
        self._rows, self._bytes = [], 0


def real(value: float | None) -> float | str | None:
    """As SQLite gives it back. It turns NaN into NULL, which would read as "not recorded": a text keeps it."""
    return value if value is None else "nan" if math.isnan(value) else float(value) + 0.0  # no -0.0 in a file


def utf8(value: str) -> str:
    """Lone surrogates (undecodable bytes of a path, half a token) have no UTF-8 form: they become `?`."""
    return value.encode("utf-8", "replace").decode("utf-8")


def tap_rows(taps: Sequence[Tap]) -> list[rows.Row]:
    """The rows of the taps, which are checked."""
    if [tap.index for tap in taps] != list(range(len(taps))):
        raise ValueError("taps must have the indices 0, 1, 2, … in order")
    if len({tap.name for tap in taps}) != len(taps):
        raise ValueError("two taps have the same name")
    for tap in taps:
        layouts.parse(tap.layout)
    return [(tap.index, utf8(tap.name), tap.layout) for tap in taps]
