"""Writers that die or run out of disk: the file opens, is whole, and has lost at most the step in flight."""

from __future__ import annotations

import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.sessions import Session, SessionError, SessionWriteError, SessionWriter
from lockstep.sessions.compact import compact
from lockstep.sessions.copy import copy
from lockstep.sessions.format import files, log_owner, mark
from lockstep.sessions.state import state_of
from lockstep.sessions.verify import verify
from tests.sessions.samples import create, record, write

ROOT = Path(__file__).parents[2]

#: Records forever, a branch now and then, and prints each step that `step` returned from.
WRITER = """
import sys
from pathlib import Path
from lockstep.sessions import SessionWriter
from lockstep.sessions.verify import verify
from tests.sessions.samples import create, record
path = Path(sys.argv[1])
writer = SessionWriter.reopen(path) if path.exists() else create(path)
step = writer.next_step(0)
while True:
    writer.step(0, record(step))
    writer.event(0, step, "command", "next")
    sys.stdout.write(f"{step}\\n")
    sys.stdout.flush()
    step += 1
"""


def killed_writer(path: Path, seconds: float) -> int:
    """Run WRITER, kill it -9 that long after its first step; the last step it reported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, env=environment, cwd=ROOT
    )
    first = process.stdout.readline()
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read()
    process.wait()
    process.stdout.close()
    lines = (first + rest).split(b"\n")[:-1]  # a line cut short by the kill was not reported
    return int(lines[-1])


def check_killed(path: Path, reported: int) -> None:
    """Everything reported is there; at most the one step that was not yet reported is there too."""
    with Session.open(path) as session:
        assert len(session.steps()) - 1 in (reported, reported + 1)
        last = session.steps()[-1]
        assert session.stats(last).tobytes() == record(last).stats.tobytes()
        assert session.tensor("embed", step=last, rank=1)[0, 0] == last
        assert state_of(session) == "interrupted"
    assert verify(path) == []


@pytest.mark.parametrize("times", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_a_writer_killed_at_random_moments(tmp_path: Path, times: int) -> None:
    """Every other session is taken up again by the next writer, log and all."""
    random.seed(times)
    path = tmp_path / "0.session"
    for attempt in range(times):
        if attempt % 2 == 0:
            path = tmp_path / f"{attempt}.session"
        check_killed(path, killed_writer(path, random.uniform(0, 0.3)))
    SessionWriter.reopen(path).close()
    assert verify(path) == []
    assert sorted(file.name for file in tmp_path.glob(f"{path.name}*")) == [path.name]


#: Ends without closing, when its log has just been moved into the file.
CUT = """
import os, signal, sys
from pathlib import Path
from lockstep.sessions.format import database
from tests.sessions.samples import create, record
writer = create(Path(sys.argv[1]))
writer.step(0, record(0))
database.empty_log(writer._connection)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_killed_just_after_its_log_was_cut_has_not_closed_its_session(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    process = subprocess.run([sys.executable, "-c", CUT, str(path)], cwd=ROOT, check=False)
    assert (process.returncode, files.log_bytes(path)) == (-signal.SIGKILL, 0)
    for _ in range(2):  # the first to look leaves what it found
        with Session.open(path) as session:
            assert (state_of(session), session.steps()) == ("interrupted", range(1))
    copied, packed = tmp_path / "copied.session", tmp_path / "packed.session"
    for other in (copied, packed):
        copy(path, other)
    with sqlite3.connect(packed) as connection:
        mark.write(connection)
    compact(packed)
    SessionWriter.reopen(path).close()
    for one in (path, copied, packed):
        assert verify(one) == []
        with Session.open(one) as session:
            assert state_of(session) == "closed"


def test_a_signal_while_a_closed_session_is_opened_for_writing_leaves_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "kept.session"
    with create(path) as writer:
        for step in range(3):
            writer.step(0, record(step))
    with monkeypatch.context() as patched:
        patched.setattr(log_owner, "renew", interrupt)
        with pytest.raises(KeyboardInterrupt):
            SessionWriter.reopen(path)
    assert verify(path) == []
    with Session.open(path) as session:
        assert (session.missing, list(session.steps())) == ("", [0, 1, 2])


def limited(path: Path, limit: int) -> subprocess.CompletedProcess[str]:
    """Record under a file-size limit, as on a disk that fills up."""
    code = """
import sys
from pathlib import Path
from lockstep.sessions import SessionWriteError
from lockstep.sessions.verify import verify
from tests.sessions.samples import create, record
writer = create(Path(sys.argv[1]))
try:
    for step in range(100_000):
        writer.step(0, record(step))
except SessionWriteError as error:
    print(step)
    print(error)
try:
    writer.close()
except SessionWriteError as error:
    print(error)
"""
    return subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        check=True,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("limit", [300_000, 1_000_000, 2_500_000])
def test_a_full_disk_leaves_all_that_was_committed(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "a.session"
    steps, message, *_ = limited(path, limit).stdout.splitlines()
    assert "cannot write session" in message
    assert int(steps) > 0
    with Session.open(path) as session:
        assert len(session.steps()) == int(steps)
        last = session.steps()[-1]
        assert session.stats(last).tobytes() == record(last).stats.tobytes()
    assert verify(path) == []
    with SessionWriter.reopen(path) as writer:  # there is room again
        writer.step(0, record(int(steps)))
    assert verify(path) == []
    assert [file.name for file in tmp_path.iterdir()] == ["a.session"]


def test_recording_goes_on_once_there_is_room(tmp_path: Path) -> None:
    writer = create(tmp_path / "a.session")
    for step in range(10):
        writer.step(0, record(step))
    (pages,) = writer._connection.execute("PRAGMA page_count").fetchone()
    writer._connection.execute(f"PRAGMA max_page_count = {pages}")

    def fill() -> None:
        for step in range(10, 1000):
            writer.step(0, record(step))

    with pytest.raises(SessionWriteError, match="full"):
        fill()
    done = writer.next_step(0)
    assert 10 <= done < 999
    writer._connection.execute("PRAGMA max_page_count = 100000")
    writer.step(0, record(done))
    writer.close()
    assert verify(tmp_path / "a.session") == []


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(SessionWriteError, match="cannot write session"):
        create(tmp_path / "nowhere" / "a.session")
    if os.geteuid() != 0:  # root may write anywhere
        tmp_path.chmod(0o500)
        with pytest.raises(SessionWriteError):
            create(tmp_path / "a.session")
        tmp_path.chmod(0o700)


def test_a_closed_writer_reports_it(tmp_path: Path) -> None:
    writer = create(tmp_path / "a.session")
    writer.close()
    writer.close()
    with pytest.raises(SessionWriteError, match="closed"):
        writer.event(0, 0, "note", "x")


def test_an_interrupted_step_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.sessions.format import write_rows

    with create(tmp_path / "a.session") as writer:
        writer.step(0, record(0))

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(write_rows, "insert_tensors", interrupt)
            with pytest.raises(KeyboardInterrupt):
                writer.step(0, record(1))
        writer.step(0, record(1))
    assert verify(tmp_path / "a.session") == []


def test_a_damaged_session_is_not_written_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.session", 3)
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM steps WHERE step = 1")
    connection.close()
    with pytest.raises(SessionError, match="broken session"):
        SessionWriter.reopen(path)


@pytest.mark.slow
def test_a_long_log_is_cut_and_never_written_over(tmp_path: Path) -> None:
    """A commit over the rest of an older log, cut short by a kill, could not be distinguished from a damaged one."""
    path = tmp_path / "a.session"
    longest, cuts = 0, 0
    with create(path) as writer:
        for step in range(400):
            writer.step(0, record(step))
            now = files.log_bytes(path)
            cuts += now < longest
            longest = 0 if now < longest else now
            with Session.open(path) as session:
                assert session.steps() == range(step + 1)
            assert now < 6 << 20
    assert cuts > 1
    assert verify(path) == []


def test_nothing_of_a_step_is_in_the_log_before_its_commit(tmp_path: Path) -> None:
    """SQLite rewrites at the commit what it wrote early: a writer killed there leaves a log that looks damaged."""
    path = tmp_path / "a.session"
    with create(path) as writer:
        connection = writer._file.connection
        connection.execute("BEGIN")
        before = files.log_bytes(path)
        connection.execute("CREATE TABLE large (bytes)")
        connection.execute("INSERT INTO large VALUES (randomblob(16000000))")
        assert files.log_bytes(path) == before
        connection.execute("ROLLBACK")


@pytest.mark.parametrize("failures", [1, 2])
def test_a_file_that_has_all_is_marked_so_once_its_log_has_made_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    clear, left = mark.clear, [failures]

    def full(connection: sqlite3.Connection) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise sqlite3.OperationalError("database or disk is full")
        clear(connection)

    path = tmp_path / "run.session"
    writer = create(path)
    writer.event(0, 0, "note", "seen")
    monkeypatch.setattr(mark, "clear", full)
    if failures == 1:
        writer.close()
    else:
        with pytest.raises(SessionWriteError, match=r"has all that was recorded, but .*copy --salvage"):
            writer.close()
    assert [one.name for one in tmp_path.iterdir()] == ["run.session"], "the log is gone"
    with Session.open(path) as session:
        assert [event.text for event in session.events()] == ["seen"]
        assert state_of(session) == ("closed" if failures == 1 else "incomplete")
