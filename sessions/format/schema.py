"""The file format: one SQLite 3 database, `NAME.session`. This module is its specification.

    header      application_id "Lstp", user_version = SCHEMA_VERSION; UTF-8; write-ahead log while it grows,
                known by the schema cookie (`sessions.format.log_owner`)
    meta        key -> JSON: the fields of `sessions.meta.SessionMeta`; "ranks", which is always there; "recording",
                true until its writer closes it
    taps        the tap order that statistics and checksums follow
    branches    lines of history; 0 is "main"; a branch shares its parent's steps before fork_step
    steps       one row a forward pass; a branch's own steps are contiguous from fork_step
    sequences   what a step did to each sequence; integer lists as `codec.encode_ints`. `kv_lens` are the rows that
                each layer has cached, rank after rank: [ranks × layers]; empty: not known
    recent      statistics and checksums of the newest steps: one array of all taps a step
    chunks      … of older steps: CHUNK_STEPS at a time, turned so that one tap's history is contiguous
    columns     one tap of one chunk: [8, ranks, steps] float32 or [ranks, steps] uint64
    blobs       tensors by content: blake2b-128 of dtype, shape and bytes; zstd over byte planes
    tensors     which blob a tap was on a rank for a sequence at a step
    events      commands, stops, notes, in order: ids from 1 without a gap
    verdicts    what was judged; the newest judgement of a tap at a step stands
    in_flight   the step that has stopped in its middle, where it stands and what has passed: arrays as in `recent`,
                b"": none; `tensors` is how many it has in that table. The whole step's rows replace it
    totals      for each table of COUNTED: its number of rows and the sum of their `crc`

`crc` is in every row `rows.checksum` of the table's name and the row's other columns, keys included, so that a
row that is reached under another key is found too; of `blobs` without `data`, which `hash` covers. A row that is
missing is found by what counts it: `totals`, and in `steps` the bits of `arrays` (1 << kind), the number of
`sequences` and the number of `tensors` of the step. `crc` protects from damage, not from a forger.

Versions 1 and 2 had neither `crc` nor `totals`, `in_flight`, `arrays`, `sequences` and `tensors`.

Tables only: no view, trigger, virtual table or generated column, and a reader refuses a file whose schema
is not, to the letter, the one below.
"""

from __future__ import annotations

import re

APPLICATION_ID = 0x4C737470  # "Lstp"
SCHEMA_VERSION = 3
#: Versions that can be read; see `sessions.format.migrate`.
READABLE_VERSIONS = (1, 2, SCHEMA_VERSION)
#: The first version whose rows carry checksums.
PROTECTED_SINCE = 3

#: 16 KiB pages hold the rows of `columns` without overflow pages.
PAGE_SIZE = 16384
#: Of a compacted session without chunks: a page holds a verdict with its figures, and little is left over.
SMALL_PAGE_SIZE = 2048
#: Steps in a chunk: more makes a series cheaper to read, fewer a step. Measured in benchmarks/sessions.py.
CHUNK_STEPS = 64

#: The two arrays of a step, by `kind`.
STATS, CHECKSUMS = 0, 1

TABLES: dict[str, str] = {
    "meta": (
        "CREATE TABLE meta (key TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID"
    ),
    "taps": (
        "CREATE TABLE taps (id INTEGER PRIMARY KEY, name TEXT NOT NULL, layout TEXT NOT NULL, crc INTEGER NOT NULL)"
    ),
    "branches": (
        "CREATE TABLE branches (id INTEGER PRIMARY KEY, name TEXT NOT NULL, parent INTEGER,"
        " fork_step INTEGER NOT NULL, rules TEXT NOT NULL, crc INTEGER NOT NULL)"
    ),
    "steps": (
        "CREATE TABLE steps (branch INTEGER NOT NULL, step INTEGER NOT NULL, phase TEXT NOT NULL,"
        " wall_seconds REAL NOT NULL, free_blocks INTEGER, used_blocks INTEGER, dropped TEXT NOT NULL,"
        " arrays INTEGER NOT NULL, sequences INTEGER NOT NULL, tensors INTEGER NOT NULL, crc INTEGER NOT NULL,"
        " PRIMARY KEY (branch, step)) WITHOUT ROWID"
    ),
    "sequences": (
        "CREATE TABLE sequences (branch INTEGER NOT NULL, step INTEGER NOT NULL, seq INTEGER NOT NULL,"
        " ids BLOB NOT NULL, positions BLOB NOT NULL, kv_lens BLOB NOT NULL, block_table BLOB NOT NULL,"
        " emitted INTEGER, forced INTEGER NOT NULL, topk_ids BLOB NOT NULL, topk_logits BLOB NOT NULL,"
        " logsumexp REAL, entropy REAL, crc INTEGER NOT NULL, PRIMARY KEY (branch, step, seq)) WITHOUT ROWID"
    ),
    "recent": (
        "CREATE TABLE recent (branch INTEGER NOT NULL, kind INTEGER NOT NULL, step INTEGER NOT NULL,"
        " data BLOB NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (branch, kind, step)) WITHOUT ROWID"
    ),
    "chunks": (
        "CREATE TABLE chunks (id INTEGER PRIMARY KEY, branch INTEGER NOT NULL, kind INTEGER NOT NULL,"
        " first_step INTEGER NOT NULL, last_step INTEGER NOT NULL, steps BLOB NOT NULL, crc INTEGER NOT NULL)"
    ),
    "columns": (
        "CREATE TABLE columns (chunk INTEGER NOT NULL, tap INTEGER NOT NULL, data BLOB NOT NULL, crc INTEGER NOT NULL,"
        " PRIMARY KEY (chunk, tap)) WITHOUT ROWID"
    ),
    "blobs": (
        "CREATE TABLE blobs (id INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, dtype TEXT NOT NULL,"
        " shape TEXT NOT NULL, crc INTEGER NOT NULL, data BLOB NOT NULL)"
    ),
    "tensors": (
        "CREATE TABLE tensors (branch INTEGER NOT NULL, step INTEGER NOT NULL, tap INTEGER NOT NULL,"
        " seq INTEGER NOT NULL, rank INTEGER NOT NULL, slice TEXT NOT NULL, blob INTEGER NOT NULL,"
        " crc INTEGER NOT NULL, PRIMARY KEY (branch, step, tap, seq, rank, slice)) WITHOUT ROWID"
    ),
    "events": (
        "CREATE TABLE events (id INTEGER PRIMARY KEY, branch INTEGER NOT NULL, step INTEGER NOT NULL,"
        " kind TEXT NOT NULL, text TEXT NOT NULL, data TEXT NOT NULL, crc INTEGER NOT NULL)"
    ),
    "verdicts": (
        "CREATE TABLE verdicts (branch INTEGER NOT NULL, step INTEGER NOT NULL, tap TEXT NOT NULL,"
        " verdict TEXT NOT NULL, detail TEXT NOT NULL, crc INTEGER NOT NULL,"
        " PRIMARY KEY (branch, step, tap)) WITHOUT ROWID"
    ),
    "in_flight": (
        "CREATE TABLE in_flight (branch INTEGER PRIMARY KEY, step INTEGER NOT NULL, place INTEGER NOT NULL,"
        " sequences TEXT NOT NULL, stats BLOB NOT NULL, checksums BLOB NOT NULL, tensors INTEGER NOT NULL,"
        " crc INTEGER NOT NULL)"
    ),
    "totals": (
        "CREATE TABLE totals (name TEXT PRIMARY KEY NOT NULL, number INTEGER NOT NULL, crcs INTEGER NOT NULL,"
        " crc INTEGER NOT NULL) WITHOUT ROWID"
    ),
}

#: The tables that have a row in `totals`.
COUNTED = ("meta", "taps", "branches", "steps", "events", "verdicts")

#: The columns that `crc` covers, in its order; they are what a reader takes of a row.
COLUMNS: dict[str, tuple[str, ...]] = {
    name: tuple(
        column
        for column in re.findall(r"(\w+) (?:TEXT|INTEGER|REAL|BLOB)", sql)
        if column != "crc" and (name, column) != ("blobs", "data")
    )
    for name, sql in TABLES.items()
}
#: … of which version 3 brought these.
ADDED = ("arrays", "sequences", "tensors")


def objects(version: int) -> frozenset[tuple[str, str, str, str | None]]:
    """Everything that sqlite_schema may hold in a file of that version: (type, name, table, sql)."""
    tables = dict(TABLES)
    if version < PROTECTED_SINCE:
        del tables["totals"], tables["in_flight"]
        added = "|".join((*ADDED, "crc"))
        tables = {name: re.sub(rf", ({added}) INTEGER NOT NULL", "", sql) for name, sql in tables.items()}
    return frozenset(
        [("table", name, name, sql) for name, sql in tables.items()]
        + [("index", "sqlite_autoindex_blobs_1", "blobs", None)]
    )
