"""Single flipped bits, in the file and in its log: what is shown is equal, refused or reported."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions import Session, SessionError, SessionWriter, TensorRecord, VerdictRecord
from lockstep.sessions.compact import compact
from lockstep.sessions.format import files
from lockstep.sessions.format.schema import CHUNK_STEPS
from lockstep.sessions.verify import verify
from tests.sessions.flips import changed, flip, flips, recording, shown, silent
from tests.sessions.samples import create, record, tamper, write

pytestmark = pytest.mark.sampled_file(2)

OLD = Path(__file__).parent / "data" / "version_2.session"


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """So few steps in a chunk that a session with some is read in no time."""
    for module in ("lockstep.sessions.writer", "lockstep.sessions.format.chunks"):
        monkeypatch.setattr(f"{module}.CHUNK_STEPS", 8)
    return 8


def check(directory: Path, steps: int, count: int, *, log: bool, seed: int = 0) -> None:
    """Flip `count` bits, one at a time, of a session's file or its log."""
    whole = recording(directory / "whole.session", steps, finished=not log)
    name: Callable[[Path], Path] = files.wal_of if log else Path
    before = shown(whole)
    assert (verify(whole), before.reported) == ([], [])
    harmless = 0
    for byte, bit in flips(name(whole), count, seed=count + seed):
        path = directory / "a.session"
        for file in (path, *files.companions(path)):
            file.unlink(missing_ok=True)
        shutil.copyfile(whole, path)
        if log:
            shutil.copyfile(files.wal_of(whole), files.wal_of(path))
        flip(name(path), byte, bit)
        after = shown(path)
        assert silent(before, after) == [], f"bit {bit} of byte {byte}"
        assert verify(path) or not changed(before, after), f"bit {bit} of byte {byte} is no problem to verify"
        harmless += not changed(before, after)
    assert harmless < count, "no flip was one of anything"


@pytest.mark.slow
def test_no_flipped_bit_changes_silently_what_is_shown(tmp_path: Path, short_chunks: int) -> None:
    check(tmp_path, short_chunks + 3, 40, log=False)


@pytest.mark.slow
def test_no_flipped_bit_of_the_log_loses_steps_silently(tmp_path: Path, short_chunks: int) -> None:
    check(tmp_path, short_chunks + 3, 15, log=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("count", "log"), [(90, False), (35, True)])
def test_500_flipped_bits(tmp_path: Path, short_chunks: int, count: int, log: bool, seed: int) -> None:
    check(tmp_path, 3 * short_chunks + 3, count, log=log, seed=seed)


def read_arrays(session: Session) -> list[int]:
    """The steps whose statistics can be read."""
    found = []
    for step in session.steps():
        try:
            session.stats(step)
            found.append(step)
        except SessionError as error:
            assert f"step {step} of branch 0, statistics" in str(error)  # noqa: PT017 - the others go on
    return found


@pytest.mark.parametrize(
    ("statement", "read", "words"),
    [
        ("UPDATE steps SET wall_seconds = 7 WHERE step = 2", "step", "step 2 of branch 0: its checksum"),
        ("UPDATE sequences SET emitted = 9 WHERE step = 2", "step", "step 2 of branch 0, sequence 0: its checksum"),
        ("DELETE FROM sequences WHERE step = 2", "step", "step 2 of branch 0: 0 of 1 sequences"),
        ("UPDATE recent SET step = 5 WHERE step = 2 AND kind = 0", "stats", "step 2 of branch 0, statistics: they are"),
        ("DELETE FROM tensors WHERE step = 2 AND rank = 1", "captured", "tensors of step 2 of branch 0: 1 of 2"),
        ("DELETE FROM blobs WHERE id = 3", "captured", "tensors of step 2 of branch 0: the content 3"),
    ],
)  # fmt: skip
def test_damage_is_reported_with_its_place_and_the_rest_is_readable(
    tmp_path: Path, statement: str, read: str, words: str
) -> None:
    path = tamper(write(tmp_path / "a.session", 4), statement, sealed=False)
    with Session.open(path) as session:
        for step in (0, 1, 3):
            getattr(session, read)(step)
        with pytest.raises(SessionError, match=words):
            getattr(session, read)(2)
    assert [problem for problem in verify(path) if words in problem]


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE events SET text = 'y' WHERE id = 2", "event 2: its checksum"),
        ("DELETE FROM events WHERE id = 2", "table 'events': 1 of 3 rows are missing"),
        ("DELETE FROM events", "table 'events': 3 of 3 rows are missing"),
        ("UPDATE verdicts SET verdict = 'pass'", "verdict on 'embed', step 1 of branch 0: its checksum"),
        ("UPDATE meta SET value = '\"you\"' WHERE key = 'source'", "meta 'source': its checksum"),
        ("DELETE FROM meta WHERE key = 'source'", "table 'meta': 1 of"),
        ("DELETE FROM steps WHERE step = 2", "table 'steps': 1 of 3 rows are missing"),
        ("DELETE FROM totals WHERE name = 'steps'", "number of rows of 'steps': it is missing"),
    ],
)
def test_what_is_missing_of_the_whole_is_reported(tmp_path: Path, statement: str, words: str) -> None:
    with create(tmp_path / "a.session", source="me") as writer:
        for step in range(3):
            writer.step(0, record(step))
            writer.event(0, step, "note", "x")
        writer.verdicts([VerdictRecord(0, 1, "embed", "fail")])
    path = tamper(writer.path, statement, sealed=False)
    with Session.open(path) as session:
        session.events()
        session.verdicts()
        assert [problem for problem in session.losses if words in problem]
        assert session.stats(1) is not None
    assert [problem for problem in verify(path) if words in problem]


def test_the_taps_that_were_captured_are_checked(tmp_path: Path) -> None:
    for statement in ("UPDATE tensors SET tap = 1 WHERE step = 1", "DELETE FROM tensors WHERE step = 1"):
        path = tamper(write(tmp_path / "a.session", 3), statement, sealed=False)
        with Session.open(path) as session, pytest.raises(SessionError, match="damaged: tensor"):
            session.captured_taps()
        path.unlink()


def test_what_lacks_rows_is_not_recorded_on(tmp_path: Path) -> None:
    path = tamper(write(tmp_path / "a.session", 3), "DELETE FROM steps WHERE step = 2", sealed=False)
    with pytest.raises(SessionError, match="1 of 3 rows are missing"):
        SessionWriter.reopen(path)


def test_a_chunk_that_is_damaged_costs_its_steps(tmp_path: Path, short_chunks: int) -> None:
    path = write(tmp_path / "a.session", 2 * short_chunks + 2)
    tamper(path, "UPDATE columns SET data = x'00' WHERE chunk = 1 AND tap = 1", sealed=False)
    with Session.open(path) as session:
        assert read_arrays(session) == list(range(short_chunks, 2 * short_chunks + 2))
        session.series("embed", "rms", 0)
        with pytest.raises(SessionError, match="chunk 1, tap 1"):
            session.series(session.taps[1].name, "rms", 0)
        assert len(session.series(session.taps[1].name, "rms", 0, start=short_chunks)[0]) == short_chunks + 2


def test_what_is_changed_later_keeps_its_checksums(tmp_path: Path) -> None:
    with create(tmp_path / "a.session", source="me") as writer:
        for step in range(CHUNK_STEPS + 1):
            writer.step(0, record(step))
        writer.set_meta(source="you", prompts=("x",))
        for word in ("fail", "pass"):
            writer.verdicts([VerdictRecord(0, 1, "embed", word)])
        for part in ("", "-1:", "-1:"):
            writer.tensors(0, 1, [TensorRecord("embed", 0, 0, np.ones(2), "float64", part)], dropped=["some"])
        assert verify(writer.path) == []
    compact(writer.path)
    assert verify(writer.path) == []
    with SessionWriter.reopen(writer.path) as writer:
        writer.step(0, record(CHUNK_STEPS + 1))
    assert verify(writer.path) == []


def test_old_files_are_read_and_not_protected(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    shutil.copyfile(OLD, path)
    with Session.open(path) as session:
        assert (session.version, session.protected, session.losses) == (2, False, [])
        assert session.stats(2, 1).tobytes() == record(2).stats.tobytes()
        assert session.rebuilt("embed", step=1).array[0, 0] == 1
        assert [event.text for event in session.events()] == ["seen"]
        assert [verdict.verdict for verdict in session.verdicts(step=1)] == ["fail"]
    assert verify(path) == []
    with pytest.raises(SessionError, match="session format 2"):
        SessionWriter.reopen(path)


def places(path: Path) -> dict[str, object]:
    """What a sound session shows."""
    found = shown(path)
    assert not found.reported
    return found.places


@pytest.mark.sampled(2)
@pytest.mark.parametrize("old", ["version_2.session", "v0_1.session"])
def test_packing_an_old_file_protects_it(tmp_path: Path, old: str) -> None:
    path = Path(shutil.copyfile(OLD.with_name(old), tmp_path / "a.session"))
    before = places(path)
    compact(path)
    assert places(path) == before
    with Session.open(path) as session:
        assert session.protected
    assert verify(path) == []
    assert [file.name for file in tmp_path.iterdir()] == ["a.session"]


def test_a_damaged_session_is_not_packed(tmp_path: Path) -> None:
    for statement in ("UPDATE tensors SET blob = 77 WHERE step = 1", "DELETE FROM steps WHERE step = 2"):
        path = tamper(write(tmp_path / "a.session", 3), statement, sealed=False)
        content = path.read_bytes()
        with pytest.raises(SessionError, match="damaged"):
            compact(path)
        assert path.read_bytes() == content
        path.unlink()


def test_what_is_recorded_anew_is_protected(tmp_path: Path) -> None:
    with Session.open(write(tmp_path / "b.session", 1)) as session:
        assert session.protected
