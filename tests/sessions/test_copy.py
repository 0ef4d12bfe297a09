"""A session whose log stayed behind is called incomplete; `copy` makes a whole one, of a growing one as well."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.sessions import Session, SessionError, SessionWriteError, SessionWriter
from lockstep.sessions.compact import compact
from lockstep.sessions.copy import copy
from lockstep.sessions.errors import SessionBusy
from lockstep.sessions.format.schema import CHUNK_STEPS
from lockstep.sessions.state import state_of
from lockstep.sessions.verify import verify
from tests.sessions.samples import create, record, write


def lone(path: Path) -> Path:
    """What `cp a.session b.session` makes of one that is being recorded."""
    with create(path.with_name("a.session")) as writer:
        for step in range(CHUNK_STEPS + 3):
            writer.step(0, record(step))
        shutil.copy(path.with_name("a.session"), path)
    return path


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def test_a_lone_copy_is_incomplete_and_what_it_holds_is_readable(tmp_path: Path) -> None:
    path = lone(tmp_path / "b.session")
    with Session.open(path) as session:
        assert state_of(session) == "incomplete"
        assert "the log b.session-wal is not beside it" in session.missing
        assert all(session.stats(s).tobytes() == record(s).stats.tobytes() for s in session.steps())
    (problem,) = verify(path)
    assert problem.startswith("incomplete: the log b.session-wal is not beside it")


@pytest.mark.parametrize("change", [SessionWriter.reopen, compact])
def test_what_is_incomplete_is_not_made_to_look_whole(tmp_path: Path, change: object) -> None:
    path = lone(tmp_path / "b.session")
    before = path.read_bytes()
    with pytest.raises(SessionError, match="incomplete"):
        change(path)
    with pytest.raises(SessionError, match="incomplete"):
        copy(path, tmp_path / "c.session")
    assert path.read_bytes() == before
    assert names(tmp_path) == ["a.session", "b.session"]


def test_the_state_of_a_session(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with create(path) as writer:
        writer.step(0, record(0))
        with Session.open(path) as session:
            assert state_of(session) == "recording"
        for file in (path, tmp_path / "a.session-wal"):
            shutil.copy(file, tmp_path / file.name.replace("a.", "killed."))
    with Session.open(path) as session:
        assert state_of(session) == "closed"
        assert session.missing == ""
    with Session.open(tmp_path / "killed.session") as session:
        assert state_of(session) == "interrupted"


def test_a_copy_of_a_growing_session_is_whole(tmp_path: Path) -> None:
    source, target = tmp_path / "a.session", tmp_path / "b.session"
    with create(source) as writer:
        for step in range(CHUNK_STEPS + 3):
            writer.step(0, record(step))
        copy(source, target)
        writer.step(0, record(CHUNK_STEPS + 3))
    assert verify(target) == []
    with Session.open(target) as session:
        assert state_of(session) == "closed"
        assert session.steps() == range(CHUNK_STEPS + 3)
        assert all(session.stats(s).tobytes() == record(s).stats.tobytes() for s in session.steps())
    assert names(tmp_path) == ["a.session", "b.session"]


def test_a_copy_takes_no_name_that_is_taken(tmp_path: Path) -> None:
    source, other = write(tmp_path / "a.session", 2), write(tmp_path / "b.session", 1)
    with pytest.raises(FileExistsError, match="exists"):
        copy(source, other)
    copy(source, other, overwrite=True)
    with Session.open(other) as session:
        assert session.steps() == range(2)
    with SessionWriter.reopen(other), pytest.raises(SessionBusy):
        copy(source, other, overwrite=True)
    with pytest.raises(SessionWriteError, match="onto itself"):
        copy(source, tmp_path / ".." / tmp_path.name / "a.session", overwrite=True)
    assert verify(source) == []


def test_a_copy_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "a.session", 2)
    with pytest.raises(SessionWriteError, match="cannot write session"):
        copy(source, tmp_path / "nowhere" / "b.session")
    assert names(tmp_path) == ["a.session"]


def test_a_session_that_a_reader_left_last_is_closed(tmp_path: Path) -> None:
    """The reader's leaving and the writer's closing may fall together: the header must not ask for a log then."""
    path = tmp_path / "a.session"
    writer = create(path)
    writer.step(0, record(0))
    session = Session.open(path)
    writer._file.connection.set_trace_callback(
        lambda sql: session._archive._connection.close() if "DELETE" in sql else None
    )
    writer.close()
    with Session.open(path) as again:
        assert state_of(again) == "closed"
