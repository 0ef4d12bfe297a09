"""A log belongs to its file: beside any other one it is not read, not lost, and reported."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.sessions import Session, SessionError, SessionMeta, SessionWriter
from lockstep.sessions.compact import compact
from lockstep.sessions.copy import copy
from lockstep.sessions.format import files
from lockstep.sessions.remove import remove
from lockstep.sessions.salvage import salvage
from lockstep.sessions.state import foreign_log, state_of
from lockstep.sessions.verify import verify
from tests.sessions.samples import TAPS, create, record, write
from tests.sessions.test_crash import ROOT

pytestmark = pytest.mark.sampled_file(2)

GOOD, KILLED = 30, 9

#: Records so many steps and ends without closing.
_CUT = """
import os, signal, sys
from pathlib import Path
from lockstep.sessions import SessionWriter
from tests.sessions.samples import create, record
path = Path(sys.argv[1])
writer = SessionWriter.reopen(path) if path.exists() else create(path)
for step in range(writer.next_step(0), int(sys.argv[2])):
    writer.step(0, record(step))
writer.event(0, 0, "note", "the log is not empty")
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(path: Path, steps: int = KILLED) -> Path:
    """A session, new or recorded on, whose writer was killed after so many steps: its log is beside it."""
    subprocess.run([sys.executable, "-c", _CUT, str(path), str(steps)], cwd=ROOT, check=False)
    assert files.log_bytes(path) > 0
    return path


def steps_of(path: Path) -> int:
    """How many steps it has, each of them as it was recorded."""
    with Session.open(path) as session:
        for step in session.steps():
            assert session.stats(step).tobytes() == record(step).stats.tobytes(), step
        return len(session.steps())


def moved(source: Path, path: Path) -> Path:
    """What `mv` does, to the file alone."""
    source.replace(path)
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """30 good steps under the name of a killed run of 9, whose log is there still."""
    path = killed(tmp_path / "run.session")
    return moved(write(tmp_path / "good.session", GOOD), path)


def test_a_closed_file_is_not_read_with_the_log_of_another(good: Path) -> None:
    log = files.wal_of(good).read_bytes()
    with Session.open(good) as session:
        assert (len(session.steps()), state_of(session), session.growing) == (GOOD, "closed", False)
        assert "run.session-wal is the log of another session" in foreign_log(session)
        assert session.losses == []
        assert session.refresh() is False
    assert steps_of(good) == GOOD
    assert verify(good) == []
    copy(good, good.with_name("copied.session"))
    assert steps_of(good.with_name("copied.session")) == GOOD
    assert files.wal_of(good).read_bytes() == log


def test_packing_sets_the_log_of_another_aside(good: Path) -> None:
    log = files.wal_of(good).read_bytes()
    packed = compact(good)
    assert (steps_of(good), verify(good)) == (GOOD, [])
    assert packed.set_aside.read_bytes() == log
    assert not files.exists(files.wal_of(good))


def test_recording_on_sets_the_log_of_another_aside(good: Path) -> None:
    log = files.wal_of(good).read_bytes()
    with SessionWriter.reopen(good) as writer:
        assert writer.set_aside.read_bytes() == log
        writer.step(0, record(GOOD))
        assert steps_of(good) == GOOD + 1  # while it is recorded
    assert (steps_of(good), verify(good)) == (GOOD + 1, [])


@pytest.mark.parametrize("with_log", [False, True], ids=["closed", "killed"])
def test_a_new_session_sets_the_log_of_another_aside(tmp_path: Path, with_log: bool) -> None:
    """The file that the log belongs to was moved away without it: the two can be joined again."""
    path, saved = killed(tmp_path / "run.session"), tmp_path / "saved.session"
    moved(path, saved)
    if with_log:  # another one stands there
        moved(killed(tmp_path / "other.session"), path)
    with SessionWriter.create(path, taps=TAPS, ranks=2, meta=SessionMeta(), overwrite=True) as writer:
        log = writer.set_aside
        writer.step(0, record(0))
    assert steps_of(path) == 1
    log.replace(files.wal_of(saved))
    assert (steps_of(saved), verify(saved)) == (KILLED, [])


def test_removing_a_session_leaves_the_log_of_another(good: Path) -> None:
    log = files.wal_of(good).read_bytes()
    remove(good)
    assert not files.exists(good)
    assert files.wal_of(good).read_bytes() == log


def test_of_two_killed_runs_each_log_belongs_to_its_own_file(tmp_path: Path) -> None:
    """`mv other.session run.session`, both killed: what is there is incomplete, and is not recorded on."""
    path, other = killed(tmp_path / "run.session", 5), killed(tmp_path / "other.session")
    log = files.wal_of(path).read_bytes()
    moved(other, path)
    with Session.open(path) as session:
        assert state_of(session) == "incomplete"
        assert "is the log of another session" in session.missing
    (problem,) = verify(path)
    assert problem.startswith("incomplete: run.session-wal is the log of another session")
    for change in (SessionWriter.reopen, compact, lambda one: copy(one, tmp_path / "copied.session")):
        with pytest.raises(SessionError, match="the log of another session"):
            change(path)
    assert "the log of another session" in salvage(path, tmp_path / "whole.session")
    assert files.wal_of(path).read_bytes() == log


def test_a_session_moved_with_its_log_is_the_same_session(tmp_path: Path) -> None:
    path, other = killed(tmp_path / "run.session"), tmp_path / "other.session"
    files.wal_of(path).replace(files.wal_of(other))
    moved(path, other)
    assert (steps_of(other), verify(other)) == (KILLED, [])
    with SessionWriter.reopen(other) as writer:
        assert writer.set_aside is None
        writer.step(0, record(KILLED))
    assert steps_of(other) == KILLED + 1


def test_a_killed_run_is_taken_up_again_and_killed_again(tmp_path: Path) -> None:
    path = tmp_path / "run.session"
    for steps in (3, 6, 9):
        killed(path, steps)
        assert (steps_of(path), verify(path)) == (steps, [])


def test_a_backup_is_put_back_over_a_run_that_went_on_from_it(tmp_path: Path) -> None:
    """Both have the same beginning, and the same file was copied: still the log is not the backup's."""
    path, backup = killed(tmp_path / "run.session", 5), tmp_path / "backup.session"
    SessionWriter.reopen(path).close()
    shutil.copy(path, backup)
    killed(path)
    moved(backup, path)
    assert steps_of(path) == 5
    with SessionWriter.reopen(path) as writer:
        assert files.exists(writer.set_aside)
    assert (steps_of(path), verify(path)) == (5, [])


def test_the_log_of_an_older_copy_is_not_read_with_a_later_state(tmp_path: Path) -> None:
    """File and log were copied, the run was taken up again and killed: the older log comes back alone."""
    path, old = killed(tmp_path / "run.session", 5), tmp_path / "old-wal"
    shutil.copy(files.wal_of(path), old)
    killed(path)
    assert steps_of(path) == KILLED
    shutil.copy(old, files.wal_of(path))
    with Session.open(path) as session:
        assert "is the log of another session" in session.missing
        assert state_of(session) == "incomplete"


def test_a_log_in_place_of_the_one_being_written_is_set_aside(tmp_path: Path) -> None:
    other = files.wal_of(killed(tmp_path / "other.session"))
    foreign = other.read_bytes()
    with create(tmp_path / "run.session") as writer:
        writer.step(0, record(0))
        other.replace(files.wal_of(writer.path))
        writer.step(0, record(1))
        assert writer.set_aside.read_bytes() == foreign
    assert (steps_of(writer.path), verify(writer.path)) == (2, [])


def test_looking_whose_log_it_is_leaves_the_locks_of_this_process(tmp_path: Path) -> None:
    """Reading a file's first bytes and closing it drops every lock that this process has on it; another process
    would then take itself for the last one, and fold the log away."""
    code = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('PRAGMA journal_mode = DELETE').fetchall()"
    with create(tmp_path / "run.session") as writer:
        writer.step(0, record(0))
        for _ in range(2):
            assert steps_of(writer.path) == 1
        done = subprocess.run(
            [sys.executable, "-c", code, str(writer.path)], capture_output=True, text=True, check=False
        )
        assert "database is locked" in done.stderr
        writer.step(0, record(1))
    assert steps_of(writer.path) == 2
