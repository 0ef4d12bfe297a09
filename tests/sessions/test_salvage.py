"""Of a session that lost its newest steps, `salvage` makes a whole one of the others, which states what it lacks."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from lockstep.sessions import Session, SessionWriter
from lockstep.sessions.compact import compact
from lockstep.sessions.copy import copy
from lockstep.sessions.errors import SessionError
from lockstep.sessions.format import files
from lockstep.sessions.salvage import salvage
from lockstep.sessions.state import state_of
from lockstep.sessions.verify import verify
from tests.sessions.samples import create, record, write

STEPS = 6


def cut_off(path: Path) -> Path:
    """What a power cut may leave: the log's last commits stand there, a frame before them never reached the disk."""
    with create(path.with_name("a.session")) as writer:
        for step in range(STEPS):
            writer.step(0, record(step))
        shutil.copy(path.with_name("a.session"), path)
        shutil.copy(files.wal_of(path.with_name("a.session")), files.wal_of(path))
    log = bytearray(files.wal_of(path).read_bytes())
    (page,) = struct.unpack(">I", log[8:12])
    frames = (len(log) - 32) // (24 + page)
    lost = 32 + (frames * 2 // 3) * (24 + page)
    log[lost : lost + 512] = bytes(512)
    files.wal_of(path).write_bytes(log)
    return path


def test_after_a_power_cut_the_steps_before_it_are_recorded_on(tmp_path: Path) -> None:
    path, target = cut_off(tmp_path / "cut.session"), tmp_path / "whole.session"
    before = path.read_bytes(), files.wal_of(path).read_bytes()
    for change in (SessionWriter.reopen, compact, lambda p: copy(p, target)):
        with pytest.raises(SessionError, match="--salvage"):
            change(path)
    with Session.open(path) as session:
        there = len(session.steps())
    assert 0 < there < STEPS
    assert "damaged at frame" in salvage(path, target)
    assert (path.read_bytes(), files.wal_of(path).read_bytes()) == before
    assert verify(target) == []
    with SessionWriter.reopen(target) as writer:
        writer.step(0, record(there))
    with Session.open(target) as session:
        assert state_of(session) == "closed"
        assert session.steps() == range(there + 1)
        assert all(session.stats(s).tobytes() == record(s).stats.tobytes() for s in session.steps())
        (note,) = session.events()
        assert note.kind == "note"
        assert note.text.startswith("copied from cut.session, incomplete: cut.session-wal is damaged")


def test_a_file_without_its_log_is_salvaged(tmp_path: Path) -> None:
    path, target = cut_off(tmp_path / "cut.session"), tmp_path / "whole.session"
    files.wal_of(path).unlink()
    assert "is not beside it" in salvage(path, target)
    assert verify(target) == []


def test_of_a_whole_session_it_is_a_copy(tmp_path: Path) -> None:
    path = write(tmp_path / "a.session", 2)
    assert salvage(path, tmp_path / "b.session") == ""
    with Session.open(tmp_path / "b.session") as session:
        assert session.steps() == range(2)
        assert session.events() == []
