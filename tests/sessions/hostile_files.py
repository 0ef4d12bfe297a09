"""Sessions as a stranger might make them: small files that ask for much memory or time, or lie about their contents.

`make(kind, path)` writes the one of that kind from KINDS. Each begins as a small session of the product's own writer
and is changed with plain SQLite, as a stranger would; light enough for child processes whose memory is measured.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from lockstep.sessions import Tap, VerdictRecord
from lockstep.sessions.format.codec import zstd
from lockstep.sessions.format.schema import CHUNK_STEPS
from tests.sessions.samples import create, record, seal, write

Connection = sqlite3.Connection
_GIB = 1 << 30
_BLOCK = 1 << 17  # the most that one zstd block holds


def zeros(nbytes: int, *, declared: bool = True) -> bytes:
    """A zstd frame (RFC 8878 §3.1.1) of so many zero bytes in run-length blocks of four bytes for each 128 KiB.
    Not `declared`: the header gives a window instead of the content's size."""
    header = b"\x28\xb5\x2f\xfd" + (b"\xe0" + nbytes.to_bytes(8, "little") if declared else b"\x00\x88")
    sizes = [_BLOCK] * (nbytes // _BLOCK) + ([nbytes % _BLOCK] if nbytes % _BLOCK else [])
    last = len(sizes) - 1
    blocks = (((size << 3) | 2 | (at == last)).to_bytes(3, "little") + b"\0" for at, size in enumerate(sizes))
    return header + b"".join(blocks)


def make(kind: str, path: Path) -> Path:
    """The hostile session of that kind, at `path`."""
    _MAKERS[kind](path)
    return path


@contextmanager
def changed(path: Path) -> Iterator[Connection]:
    """A connection for changes to the rows, which are kept and sealed; the file is one again afterwards."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        with connection:
            yield connection
            seal(connection)


def _set(table: str, column: str, value: object, steps: int = 1) -> Callable[[Path], None]:
    """A session of so many steps in which every row of `table` has `value` in `column`."""

    def build(path: Path) -> None:
        write(path, steps)
        with changed(path) as db:
            db.execute(f"UPDATE {table} SET {column} = ?", (value,))

    return build


def _tensor(
    shape: list[int], data: bytes, dtype: str = "float32", layout: str = "replicate"
) -> Callable[[Path], None]:
    """A session whose only captured tensor, the same on both ranks, has this shape and content."""

    def build(path: Path) -> None:
        write(path, 1)
        with changed(path) as db:
            db.execute("UPDATE taps SET layout = ?", (layout,))
            db.execute("UPDATE blobs SET dtype = ?, shape = ?, data = ?", (dtype, json.dumps(shape), data))

    return build


def _meta(key: str, text: str) -> Callable[[Path], None]:
    """A session with this JSON text as a row of its meta."""

    def build(path: Path) -> None:
        write(path, 1)
        with changed(path) as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, 0)", (key, text))

    return build


def _journal(text: str, words: str = "note") -> Callable[[Path], None]:
    """A session with an event and a verdict that have this JSON text as their data, the event also these words."""

    def build(path: Path) -> None:
        with create(path) as writer:
            writer.step(0, record(0))
            writer.event(0, 0, "note", "")
            writer.verdicts([VerdictRecord(0, 0, "embed", "fail")])
        with changed(path) as db:
            db.execute("UPDATE events SET text = ?, data = ?", (words, text))
            db.execute("UPDATE verdicts SET detail = ?", (text,))

    return build


def _many(table: str, sql: str, count: int) -> Callable[[Path], None]:
    """A session with `count` more rows in `table`: `sql` selects them, n counts from 1."""

    def build(path: Path) -> None:
        write(path, 1)
        with changed(path) as db:
            db.execute(
                f"WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count})"
                f" INSERT INTO {table} {sql}"
            )

    return build


def _many_taps(count: int, ranks: int, steps: int, *, chunk: bool = False) -> Callable[[Path], None]:
    """A session whose steps claim the statistics of `count` taps on `ranks` ranks: all zero, a few bytes each."""

    def build(path: Path) -> None:
        taps = tuple(Tap(i, f"layers.{i}.mlp_residual", "replicate") for i in range(count))
        with create(path, taps, ranks) as writer:
            for step in range(steps):
                writer.step(0, record(step, arrays=False, tensors=False, ranks=ranks))
        with changed(path) as db:
            for kind, size in ((0, 32), (1, 8)):
                if chunk:
                    row = (kind, kind, 0, CHUNK_STEPS - 1)
                    db.execute("INSERT INTO chunks VALUES (?, 0, ?, ?, ?, x'', 0)", row)
                    data = zeros(ranks * size * CHUNK_STEPS)
                    db.executemany(
                        "INSERT INTO columns VALUES (?, ?, ?, 0)", ((kind, tap, data) for tap in range(count))
                    )
                else:
                    data = zeros(count * ranks * size)
                    db.executemany(
                        "INSERT INTO recent VALUES (0, ?, ?, ?, 0)",
                        ((kind, step, data) for step in range(steps)),
                    )

    return build


def _chained_branches(count: int) -> Callable[[Path], None]:
    """Each branch forks from the one before it and goes on for one step."""

    def build(path: Path) -> None:
        write(path, 1)
        with changed(path) as db:
            db.executemany(
                "INSERT INTO branches VALUES (?, ?, ?, ?, '{}', 0)",
                ((n, f"b{n}", n - 1, n) for n in range(1, count)),
            )
            db.executemany(
                "INSERT INTO steps SELECT ?, ?, phase, wall_seconds, free_blocks, used_blocks, dropped,"
                " 0, 0, 0, 0 FROM steps"
                " WHERE branch = 0 AND step = 0",
                ((n, n) for n in range(1, count)),
            )

    return build


def _many_bombs(count: int, nbytes: int) -> Callable[[Path], None]:
    """Tensors at every step that are large, and distinct by their shape alone."""

    def build(path: Path) -> None:
        write(path, count, tensors=False)
        with changed(path) as db:
            for step in range(count):
                shape = json.dumps([step + 1, nbytes // 4 // (step + 1)])
                whole = zeros(nbytes // 4 // (step + 1) * (step + 1) * 4)
                db.execute(
                    "INSERT INTO blobs VALUES (?, ?, 'float32', ?, 0, ?)",
                    (step + 1, step.to_bytes(16, "big"), shape, whole),
                )
                db.executemany(
                    "INSERT INTO tensors VALUES (0, ?, 0, 0, ?, '', ?, 0)",
                    ((step, rank, step + 1) for rank in range(2)),
                )

    return build


def _repeated_slice(path: Path) -> None:
    """A captured part that names one long row many times: applied to a whole tensor it would be 400 GB."""
    write(path, 1)
    row = 1 << 20
    with changed(path) as db:
        db.execute("UPDATE blobs SET shape = ?, data = ?", (json.dumps([1, row]), zeros(4 * row)))
        db.execute("UPDATE tensors SET slice = ?", ("{" + ";".join(["0"] * 100_000) + "}",))


def _wide_text(path: Path) -> None:
    """A journal entry of which each character takes four bytes for the sake of one."""
    _journal("null", "a" * (40 << 20) + "\U0001f600")(path)


_CONTAINERS = 6_000_000  # at 3 characters of JSON and about 70 bytes of memory each
_LISTS = 8 << 20  # elements

_MAKERS: dict[str, Callable[[Path], None]] = {
    # Compressed to almost nothing: tensors, integer and float lists, statistics, checksums.
    "tensor bomb": _tensor([1 << 28], zeros(_GIB)),
    "partial bomb": _tensor([1 << 26], zeros(1 << 28), layout="partial"),
    "bfloat16 bomb": _tensor([1 << 27], zeros(1 << 28), dtype="bfloat16"),
    "undeclared bomb": _tensor([1 << 28], zeros(_GIB, declared=False)),
    "tensor bombs": _many_bombs(60, 1 << 27),
    "ids bomb": _set("sequences", "ids", zeros(8 * _LISTS)),
    "positions bomb": _set("sequences", "positions", zeros(8 * _LISTS)),
    "blocks bomb": _set("sequences", "block_table", zeros(8 * _LISTS)),
    "top-k bomb": _set("sequences", "topk_logits", zeros(8 * _LISTS)),
    "lengths bomb": _set("sequences", "kv_lens", zeros(8 * _LISTS)),
    "chunk steps bomb": _set("chunks", "steps", zeros(8 * _LISTS), CHUNK_STEPS + 2),
    "statistics bomb": _many_taps(2048, 1024, 4),
    "chunk bomb": _many_taps(2048, 1024, CHUNK_STEPS, chunk=True),
    # JSON.
    "meta bomb": _meta("notes", "[" + "[]," * _CONTAINERS + "[]]"),
    "unknown meta bomb": _meta("unknown", "[" + "{}," * _CONTAINERS + "{}]"),
    "journal bomb": _journal("[" + "{}," * _CONTAINERS + "{}]"),
    "deep journal": _journal('{"a":' * 900 + "1" + "}" * 900),
    "deep meta": _meta("absent", "[" * 900 + "]" * 900),
    "rules bomb": _set("branches", "rules", '{"a":[' + "{}," * _CONTAINERS + "{}]}"),
    "dropped bomb": _set("steps", "dropped", "[" + "[]," * _CONTAINERS + "[]]"),
    "wide text": _wide_text,
    # Counts.
    "chained branches": _chained_branches(20_000),
    "many events": _many("events", "SELECT n, 0, 0, 'note', 'x', '{}', 0 FROM numbers", 40_000),
    "many verdicts": _many("verdicts", "SELECT 0, 0, 'tap' || n, 'fail', '{}', 0 FROM numbers", 30_000),
    "many tensors": _many(
        "tensors", "SELECT 0, 0, 0, n, 0, '', (SELECT min(id) FROM blobs), 0 FROM numbers", 40_000
    ),
    "many sequences": _many(
        "sequences",
        "SELECT 0, 0, n, ids, positions, kv_lens, block_table, emitted, forced, topk_ids, topk_logits,"
        " logsumexp, entropy, 0 FROM numbers JOIN sequences WHERE branch = 0 AND step = 0 AND seq = 0",
        10_000,
    ),
    "many meta rows": _many("meta", "SELECT 'token_texts.' || n, '{}', 0 FROM numbers", 50_000),
    # Lies.
    "no such shape": _tensor([0, 10**30], b""),
    "empty and huge": _tensor([0, 1 << 62, 1 << 62], zstd.compress(b"")),
    "many layers": _meta("model", json.dumps({"num_layers": 2**52})),
    "repeated slice": _repeated_slice,
}  # fmt: skip

#: The kinds of hostile sessions.
KINDS = tuple(_MAKERS)
