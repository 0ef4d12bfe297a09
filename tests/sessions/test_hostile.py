"""A session from a stranger is data: refused clearly or shown harmlessly; nothing runs, nothing is written."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.sessions import Session, SessionError, SessionWriter
from lockstep.sessions.format.codec import zstd
from lockstep.sessions.format.schema import APPLICATION_ID, CHUNK_STEPS
from lockstep.sessions.meta import SessionMeta
from lockstep.sessions.verify import verify
from tests.sessions.samples import TAPS, record, tamper, write

pytestmark = pytest.mark.sampled_file(2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "a.session", CHUNK_STEPS + 3)


@pytest.fixture(autouse=True)
def _nothing_is_written(tmp_path: Path) -> Iterator[None]:
    """Reading leaves no new file behind."""
    yield
    assert not [
        file.name
        for file in tmp_path.rglob("*")
        if file.name.endswith(("-wal", "-shm", "-journal", ".pwned"))
    ]


def read_all(path: Path) -> None:
    """Everything that a reader can ask of a session."""
    with Session.open(path) as session:
        for branch in session.branches():
            for step in session.steps(branch.id):
                session.step(step, branch.id)
                session.stats(step, branch.id)
                session.checksums(step, branch.id)
                for key in session.captured(step, branch.id):
                    session.tensor(key.tap, step=step, rank=key.rank, seq=key.seq, slice=key.slice)
            for tap in session.taps:
                session.series(tap.name, "rms", 0, branch.id)
        session.events()
        session.verdicts()


def refused(path: Path, match: str) -> None:
    """The file is refused by reading and by writing, with the reason, and comes out of it unchanged."""
    before = path.read_bytes()
    with pytest.raises(SessionError, match=match) as error:
        Session.open(path)
    assert "\n" not in str(error.value)
    with pytest.raises(SessionError):
        SessionWriter.reopen(path)
    assert verify(path) == [str(error.value)]
    assert path.read_bytes() == before


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("CREATE VIEW extra AS SELECT 1", "extra"),
        ("CREATE TRIGGER extra AFTER INSERT ON steps BEGIN DELETE FROM steps; END", "extra"),
        ("CREATE VIRTUAL TABLE extra USING fts5(x)", "extra"),
        ("CREATE TABLE extra (x)", "extra"),
        ("CREATE INDEX extra ON steps (abs(step))", "extra"),
        ("CREATE TABLE extra (x, y GENERATED ALWAYS AS (x + 1))", "extra"),
        ("ALTER TABLE steps ADD COLUMN extra", "steps"),
        ("ALTER TABLE steps RENAME COLUMN phase TO phrase", "steps"),
        ("ALTER TABLE steps RENAME TO extra", "extra"),
    ],
)
def test_a_schema_that_is_not_ours_is_refused(path: Path, statement: str, name: str) -> None:
    refused(tamper(path, statement), f"schema has a .*'{name}'")


def test_a_view_in_place_of_a_table_is_refused_and_not_run(path: Path) -> None:
    refused(
        tamper(
            path,
            "DROP TABLE meta",
            "CREATE VIEW meta AS WITH RECURSIVE forever(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM forever)"
            " SELECT n AS key, n AS value FROM forever",
        ),
        "schema has a 'view' 'meta'",
    )


def test_a_missing_table_is_named(path: Path) -> None:
    refused(tamper(path, "DROP TABLE verdicts"), "lacks verdicts")


def test_a_hostile_name_in_the_schema_is_quoted(path: Path) -> None:
    tamper(path, 'CREATE TABLE "\x1b[2J\n" (x)')
    with pytest.raises(SessionError) as error:
        Session.open(path)
    assert "\x1b" not in str(error.value)


def test_other_databases_and_formats_are_distinguished(tmp_path: Path) -> None:
    other = tamper(tmp_path / "other.session", "CREATE TABLE t (x)")
    refused(other, "no Lockstep session")
    newer = write(tmp_path / "newer.session", 1)
    tamper(newer, "PRAGMA user_version = 99")
    refused(newer, "format 99.*update Lockstep")
    fake = tamper(
        tmp_path / "fake.session", f"PRAGMA application_id = {APPLICATION_ID}", "CREATE TABLE t (x)"
    )
    refused(fake, "format 0")


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"SQLite format 3\0", b"\0" * 5000, b"SQLite format 3\0" * 500]
)
def test_files_that_are_no_database(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.session").write_bytes(content)
    refused(tmp_path / "a.session", "no Lockstep session|is no session|no SQLite 3")


def test_what_is_no_regular_file(tmp_path: Path, path: Path) -> None:
    link, fifo = tmp_path / "link.session", tmp_path / "fifo.session"
    link.symlink_to(path)
    os.mkfifo(fifo)
    for wrong, what in ((link, "a link"), (fifo, "no regular file"), (tmp_path, "a directory")):
        with pytest.raises(SessionError, match=what):
            Session.open(wrong)
    for missing in (tmp_path / "none.session", path / "inside", tmp_path / ("x" * 5000), Path("a\0b")):
        with pytest.raises(SessionError):
            Session.open(missing)


def test_a_log_that_is_a_link_is_refused(tmp_path: Path, path: Path) -> None:
    log = path.with_name("a.session-wal")
    log.symlink_to(tmp_path / "target")
    with pytest.raises(SessionError, match="a link"):
        Session.open(path)
    log.unlink()


def test_a_truncated_file_is_refused_at_every_length(path: Path) -> None:
    whole = path.read_bytes()
    for keep in [*range(0, len(whole), len(whole) // 23), len(whole) - 1]:
        path.write_bytes(whole[:keep])
        with pytest.raises(SessionError):
            read_all(path)
        assert verify(path) != []
    path.write_bytes(whole + b"\0" * 4096)
    refused(path, "bytes long")


def test_a_page_that_is_gone_is_found(path: Path) -> None:
    """The right length, with holes where the later pages were."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + b"\0" * (len(whole) - len(whole) // 2))
    with pytest.raises(SessionError):
        read_all(path)
    assert verify(path) != []


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4))
@pytest.mark.slow
def test_flipped_bytes_are_an_error_or_harmless(flips: list[tuple[float, int]]) -> None:
    """Only bytes that mean something are flipped: seven in eight are the rest of a page."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "a.session")
        content = bytearray(_finished())
        meaningful = np.flatnonzero(np.frombuffer(content, np.uint8))
        for where, mask in flips:
            content[int(meaningful[int(where * len(meaningful))])] ^= mask
        path.write_bytes(content)
        with suppress(SessionError):  # any other exception fails the test
            read_all(path)
        verify(path)
        assert [file.name for file in Path(directory).iterdir()] == ["a.session"]
        assert path.read_bytes() == content


_CACHE: list[bytes] = []


def _finished() -> bytes:
    if not _CACHE:
        with tempfile.TemporaryDirectory() as directory:
            _CACHE.append(write(Path(directory, "a.session"), CHUNK_STEPS + 2).read_bytes())
    return _CACHE[0]


def frame(content: bytes, claims: int | None = None) -> bytes:
    """A zstd frame that claims `claims` bytes: header of RFC 8878 §3.1.1 with an 8-byte content size."""
    honest = zstd.compress(content)
    if claims is None:
        return honest
    return b"\x28\xb5\x2f\xfd" + bytes([0b11100000]) + claims.to_bytes(8, "little") + honest[6:]


TENSOR = "UPDATE blobs SET {} = ? WHERE id = (SELECT blob FROM tensors WHERE step = 0 AND rank = 0)"


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("shape", json.dumps([2**25, 2**25])),
        ("shape", "[2, 3, 1000000]"),
        ("shape", "[-2, -3]"),
        ("shape", "[true, 6]"),
        ("shape", "[1e9]"),
        ("shape", "[" + "1," * 8 + "6]"),
        ("shape", "[" * 100_000),
        ("shape", '{"a": 1}'),
        ("shape", "[2"),
        ("shape", 6),
        ("dtype", "object"),
        ("dtype", "float64"),
        ("dtype", 7),
        ("data", frame(b"\0" * 24, 2**50)),
        ("data", frame(b"\0" * 24, 25)),
        ("data", frame(b"\0" * 2**20)),
        ("data", frame(b"\0" * 23)),
        ("data", frame(b"\0" * 24) + b"more"),
        ("data", b"\x28\xb5\x2f\xfd\xff"),
        ("data", b""),
        ("data", "text"),
        ("data", 2**62),
    ],
)
def test_a_tensor_whose_header_lies_is_refused(path: Path, column: str, value: object) -> None:
    tamper(path, TENSOR.format(column), arguments=(value,))
    with Session.open(path) as session, pytest.raises(SessionError, match="broken session"):
        session.tensor("embed", step=0, rank=0)
    assert verify(path) != []


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE meta SET value = '2000000' WHERE key = 'ranks'",
        "UPDATE meta SET value = 'null' WHERE key = 'ranks'",
        "UPDATE meta SET value = '{' WHERE key = 'ranks'",
        "DELETE FROM meta",
        "UPDATE taps SET layout = 'shard(99999)' WHERE id = 1",
        "UPDATE taps SET name = 'embed'",
        "UPDATE taps SET id = 7 WHERE id = 2",
        "UPDATE taps SET name = x'00ff'",
        "UPDATE taps SET name = CAST(x'ff' AS TEXT) WHERE id = 1",
        "DELETE FROM taps WHERE id = 0",
        "DELETE FROM branches",
        "UPDATE branches SET rules = '[]'",
        "UPDATE branches SET fork_step = 3",
        "UPDATE branches SET parent = 0",
        "INSERT INTO branches VALUES (1, 'x', 2, 0, '{}', 0), (2, 'y', 1, 0, '{}', 0)",
        "DELETE FROM steps WHERE step = 5",
        "UPDATE steps SET step = 9000000000000000000 WHERE step = (SELECT max(step) FROM steps)",
        "UPDATE steps SET phase = x'00'",
        "UPDATE steps SET dropped = '{}'",
        "UPDATE steps SET dropped = '[1]'",
        "UPDATE steps SET wall_seconds = 'long'",
        "UPDATE sequences SET ids = 5",
        "UPDATE sequences SET emitted = 'x'",
        "UPDATE sequences SET positions = x'28b52ffd'",
        "UPDATE recent SET data = x'00'",
        "UPDATE chunks SET steps = x'28b52ffd'",
        "UPDATE chunks SET first_step = -9000000000000000000, last_step = 9000000000000000000",
        "UPDATE chunks SET last_step = 'x'",
        "UPDATE chunks SET last_step = last_step + 1",
        "UPDATE columns SET data = x'00' WHERE tap = 1",
        "DELETE FROM columns WHERE tap = 0",
        "UPDATE tensors SET tap = 99",
        "UPDATE tensors SET blob = -1",
        "UPDATE tensors SET rank = 77 WHERE rank = 1",
        "UPDATE blobs SET hash = x'00' WHERE id = 1",
        "INSERT INTO tensors VALUES (0, 999, 0, 0, 0, '', 1, 0)",
        "INSERT INTO sequences SELECT 5, step, seq, ids, positions, kv_lens, block_table, emitted, forced, topk_ids,"
        " topk_logits, logsumexp, entropy, 0 FROM sequences",
        "INSERT INTO columns VALUES (77, 0, x'00', 0)",
        "INSERT INTO events VALUES (1, 0, 0, 'note', 'x', '{', 0)",
        "INSERT INTO events VALUES (1, 9, 0, 'note', 'x', '1', 0)",
        "INSERT INTO verdicts VALUES (0, 'x', 'embed', 'fail', 'null', 0)",
    ],
)
def test_contents_that_contradict_the_format_are_found(path: Path, statement: str) -> None:
    tamper(path, statement)
    with suppress(SessionError):  # some are harmless to readers, but any other exception fails the test
        read_all(path)
    problems = verify(path)
    assert problems != []
    assert all(len(problem) < 1000 for problem in problems)


def test_verify_finds_a_tensor_that_was_changed(path: Path) -> None:
    assert verify(path) == []
    tamper(path, TENSOR.format("data"), arguments=(frame(np.ones(6, np.float32).tobytes()),))
    assert [problem for problem in verify(path) if "does not have its hash" in problem]


def test_a_bare_copy_of_a_growing_file_is_read_without_touching_it(tmp_path: Path, path: Path) -> None:
    """Header in log mode and no log: somebody copied the main file alone."""
    bare = tmp_path / "bare" / "b.session"
    bare.parent.mkdir()
    writer = SessionWriter.reopen(path)
    writer.step(0, record(CHUNK_STEPS + 3))
    shutil.copyfile(path, bare)
    writer.close()
    bare.parent.chmod(0o500)
    try:
        with Session.open(bare) as session:
            assert len(session.steps()) in (CHUNK_STEPS + 3, CHUNK_STEPS + 4)
            read_all(bare)
        assert [problem.split(":")[0] for problem in verify(bare)] == ["incomplete"]
        assert [file.name for file in bare.parent.iterdir()] == ["b.session"]
    finally:
        bare.parent.chmod(0o700)


def test_a_journal_of_somebody_else_is_not_rolled_back(path: Path) -> None:
    journal = path.with_name("a.session-journal")
    journal.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + b"\0\0\0\1" * 200)
    before = path.read_bytes()
    read_all(path)
    assert path.read_bytes() == before
    journal.unlink()


def test_the_reader_cannot_be_made_to_run_anything_else(path: Path) -> None:
    with Session.open(path) as session:
        for statement in (
            "ATTACH 'x.pwned' AS x",
            "DELETE FROM steps",
            "PRAGMA writable_schema = ON",
            "SELECT load_extension('x')",
            "SELECT writefile('x.pwned', 'x')",
            "CREATE TEMP TABLE t (x)",
            "WITH RECURSIVE f(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM f) SELECT n FROM f LIMIT 3",
        ):
            with pytest.raises(SessionError):
                session._archive.query(statement)


def test_strings_come_as_they_are_and_do_nothing(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07../../etc/passwd'; DROP TABLE steps; --"
    with SessionWriter.create(
        tmp_path / "a.session", taps=TAPS, ranks=2, meta=SessionMeta(prompts=(evil,))
    ) as writer:
        writer.event(0, 0, "note", evil, {"path": evil})
    with Session.open(tmp_path / "a.session") as session:
        assert session.meta.prompts[0] == session.events()[0].text == evil
    assert verify(tmp_path / "a.session") == []
