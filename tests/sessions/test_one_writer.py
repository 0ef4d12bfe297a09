"""One writer a session: what a second one, a killed one, and one whose file is taken away come to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.sessions import Session, SessionError, SessionWriteError, SessionWriter, lock
from lockstep.sessions.compact import compact
from lockstep.sessions.errors import SessionBusy, SessionMoved
from lockstep.sessions.remove import remove
from lockstep.sessions.verify import verify
from tests.sessions.samples import TAPS, create, record, write

ROOT = Path(__file__).parents[2]

#: Creates a session (over another with "over") and records a step a line of its input; prints the step, or the error.
WRITER = """
import sys
from pathlib import Path
from lockstep.sessions import SessionMeta, SessionError, SessionWriter
from tests.sessions.samples import TAPS, record
path, over = Path(sys.argv[1]), sys.argv[2] == "over"
try:
    writer = SessionWriter.create(path, taps=TAPS, ranks=2, meta=SessionMeta(), overwrite=over)
    print("open", flush=True)
    for line in sys.stdin:
        step = writer.next_step(0)
        writer.step(0, record(step))
        print(step, flush=True)
    writer.close()
except (SessionError, OSError) as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


@contextmanager
def writer_process(path: Path, how: str = "new") -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    ) as process:
        try:
            yield process
        finally:
            process.stdin.close()


def printed(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()


def do_step(process: subprocess.Popen[str]) -> str:
    process.stdin.write("\n")
    process.stdin.flush()
    return printed(process)


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def test_a_second_process_cannot_replace_what_a_first_records(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with writer_process(path) as first:
        assert printed(first) == "open"
        assert [do_step(first) for _ in range(35)] == [str(step) for step in range(35)]
        with writer_process(path, "over") as second:
            reported = printed(second)
        assert reported.startswith("SessionBusy: ")
        assert f"is being recorded by process {first.pid}." in reported
        assert do_step(first) == "35"
    assert verify(path) == []
    with Session.open(path) as session:
        assert session.steps() == range(36)
        assert session.stats(35).tobytes() == record(35).stats.tobytes()
    assert names(tmp_path) == ["a.session"]


def test_a_killed_writer_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with writer_process(path) as first:
        printed(first)
        do_step(first)
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert "a.session-lock" in names(tmp_path)
    assert lock.holder(path) == ""
    with SessionWriter.reopen(path) as writer:
        assert lock.holder(path) == f"process {os.getpid()}"
        writer.step(0, record(1))
    assert names(tmp_path) == ["a.session"]


def test_two_writers_in_one_process(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with create(path) as first:
        with pytest.raises(SessionBusy):
            SessionWriter.reopen(path)
        with pytest.raises(SessionBusy):
            SessionWriter.create(path, taps=TAPS, ranks=2, meta=first_meta(path), overwrite=True)
        first.step(0, record(0))
    assert lock.holder(path) == ""


def first_meta(path: Path):
    with Session.open(path) as session:
        return session.meta


def test_a_writer_that_could_not_be_made_holds_no_lock(tmp_path: Path) -> None:
    (tmp_path / "a.session").write_text("no session")
    with pytest.raises(SessionError):
        SessionWriter.reopen(tmp_path / "a.session")
    assert names(tmp_path) == ["a.session"]


@pytest.mark.parametrize("name", ["a.session-lock", "a.session-new"])
def test_a_strangers_file_in_the_way_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("my thesis")
    with pytest.raises(SessionWriteError, match="in the way"):
        create(tmp_path / "a.session")
    assert (tmp_path / name).read_text() == "my thesis"
    assert names(tmp_path) == [name]


def test_a_half_made_session_of_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    half = write(tmp_path / "b.session", 1).read_bytes()[:20_000]
    (tmp_path / "b.session").rename(tmp_path / "a.session-new")
    (tmp_path / "a.session-new").write_bytes(half)
    create(tmp_path / "a.session").close()
    assert names(tmp_path) == ["a.session"]


def test_a_deleted_file_is_noticed_at_the_next_commit(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    writer = create(path)
    writer.step(0, record(0))
    path.unlink()
    with pytest.raises(SessionMoved, match="deleted or moved"):
        writer.step(0, record(1))
    with pytest.raises(SessionMoved, match="deleted or moved"):
        writer.event(0, 1, "note", "x")
    with pytest.raises(SessionMoved):
        writer.close()


def test_a_replaced_file_is_noticed_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    writer = create(path)
    writer.step(0, record(0))
    os.replace(write(tmp_path / "b.session", 3), path)
    theirs = path.read_bytes()
    with pytest.raises(SessionMoved, match="another file"):
        writer.step(0, record(1))
    with pytest.raises(SessionMoved):
        writer.close()
    assert path.read_bytes() == theirs


def test_a_file_that_comes_back_is_recorded_on(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with create(path) as writer:
        writer.step(0, record(0))
        path.rename(tmp_path / "b.session")
        with pytest.raises(SessionMoved):
            writer.step(0, record(1))
        (tmp_path / "b.session").rename(path)
        writer.step(0, record(1))
    assert verify(path) == []
    assert names(tmp_path) == ["a.session"]


def test_a_log_that_was_deleted_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with create(path) as writer:
        for step in range(3):
            writer.step(0, record(step))
        (tmp_path / "a.session-wal").unlink()
        writer.step(0, record(3))
        with Session.open(path) as session:
            assert session.steps() == range(4)
    assert verify(path) == []
    assert names(tmp_path) == ["a.session"]


def test_removing_is_refused_while_somebody_records(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with create(path) as writer:
        writer.step(0, record(0))
        with pytest.raises(SessionBusy):
            remove(path)
        assert path.exists()
    remove(path)
    remove(path)
    assert names(tmp_path) == []


def test_removing_takes_what_a_killed_writer_left(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with writer_process(path) as first:
        printed(first)
        do_step(first)
        first.kill()
        first.wait()
    (tmp_path / "a.session-new").touch()
    (tmp_path / "a.session-notes").touch()
    remove(path)
    assert names(tmp_path) == ["a.session-notes"]


@pytest.mark.parametrize("killed_before", [False, True], ids=["", "a lock is left"])
def test_a_second_writer_through_a_hard_link_is_refused(tmp_path: Path, killed_before: bool) -> None:
    """The other name has neither the log nor the lock of the first."""
    path, other = tmp_path / "a.session", tmp_path / "b.session"
    with create(path) as first:
        first.step(0, record(0))
        os.link(path, other)
        if killed_before:
            lock.lock_of(other).touch()
        with pytest.raises(SessionError, match="2 names" if killed_before else "incomplete"):
            SessionWriter.reopen(other)
        with pytest.raises(SessionError, match=r"2 names|incomplete"):
            compact(other)
        first.step(0, record(1))
    assert verify(path) == []
    with Session.open(other) as session:  # closed, it is read by either name
        assert session.steps() == range(2)
    with pytest.raises(SessionWriteError, match=r"b\.session has 2 names \(hard links\)"):
        SessionWriter.reopen(other)
    path.unlink()
    SessionWriter.reopen(other).close()


def test_what_replaces_a_hard_link_leaves_the_other_name(tmp_path: Path) -> None:
    path, other = tmp_path / "a.session", tmp_path / "b.session"
    with create(path) as first:
        first.step(0, record(0))
        os.link(path, other)
        with SessionWriter.create(other, taps=TAPS, ranks=2, meta=first_meta(path), overwrite=True) as second:
            second.step(0, record(0))
            first.step(0, record(1))
    for one, steps in ((path, 2), (other, 1)):
        assert verify(one) == []
        with Session.open(one) as session:
            assert session.steps() == range(steps)


def test_a_second_writer_through_a_linked_folder_is_refused(tmp_path: Path) -> None:
    folder, linked = tmp_path / "folder", tmp_path / "linked"
    folder.mkdir()
    linked.symlink_to(folder)
    with create(folder / "a.session") as first:
        first.step(0, record(0))
        with pytest.raises(SessionBusy):
            SessionWriter.reopen(linked / "a.session")
        with writer_process(linked / "a.session", "over") as second:
            assert printed(second).startswith("SessionBusy: ")
        first.step(0, record(1))
    assert verify(folder / "a.session") == []


def test_a_second_writer_through_a_link_to_the_file_is_refused(tmp_path: Path) -> None:
    path, link = tmp_path / "a.session", tmp_path / "b.session"
    link.symlink_to(path)
    with create(path) as first:
        first.step(0, record(0))
        with pytest.raises(SessionError, match="it is a link"):
            SessionWriter.reopen(link)
        with pytest.raises(FileExistsError):
            SessionWriter.create(link, taps=TAPS, ranks=2, meta=first_meta(path))
        first.step(0, record(1))
    assert verify(path) == []
