"""`lockstep sessions`: what it says of recordings that are not whole, and how it copies and removes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sessions import Session
from sessions.state import state_of
from tests.sessions.samples import create, record, write
from workbench.cli.main import run


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data directory's sessions: closed, killed and lone; "growing" is recorded while the test runs."""
    monkeypatch.setenv("LOCKSTEP_DATA_DIR", str(tmp_path))
    directory = tmp_path / "sessions"
    directory.mkdir()
    write(directory / "closed.session", 2)
    return directory


def test_the_state_of_each_session_is_listed(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with create(kept / "growing.session") as writer:
        writer.step(0, record(0))
        shutil.copy(kept / "growing.session", kept / "lone.session")
        for suffix in ("", "-wal"):
            shutil.copy(kept / f"growing.session{suffix}", kept / f"killed.session{suffix}")
        assert run(["sessions", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["state"] for row in rows} == {
        "closed": "closed", "growing": "recording", "killed": "interrupted", "lone": "incomplete"
    }  # fmt: skip


def test_ok_is_said_of_what_was_proved(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with create(kept / "growing.session") as writer:
        writer.step(0, record(0))
        shutil.copy(kept / "growing.session", kept / "lone.session")
        assert run(["sessions", "verify", "closed"]) == 0
        assert capsys.readouterr().out.endswith("closed.session: ok\n")
        assert run(["sessions", "verify", "growing"]) == 0
        assert "ok so far: it is being recorded by process" in capsys.readouterr().out
        assert run(["sessions", "verify", "lone"]) == 1
        assert "incomplete: the log lone.session-wal is not beside it" in capsys.readouterr().out
        assert run(["sessions", "show", "lone"]) == 0
        assert "incomplete: the log lone.session-wal is not beside it" in capsys.readouterr().out
        assert run(["replay", str(kept / "lone.session"), "--ex", "info ranks"]) in (0, 2, 3)
        assert "lone.session is incomplete: the log" in capsys.readouterr().err


def test_a_growing_session_is_copied_and_not_removed(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = kept / "copied.session"
    with create(kept / "growing.session") as writer:
        writer.step(0, record(0))
        assert run(["sessions", "copy", "growing", str(target)]) == 0
        assert f"copied to {target}" in capsys.readouterr().out
        assert run(["sessions", "copy", "growing", str(target)]) == 2
        assert "exists" in capsys.readouterr().err
        assert run(["sessions", "copy", "closed", str(target), "--force"]) == 0
        assert run(["sessions", "rm", "--yes", "growing"]) == 2
        assert "is being recorded by process" in capsys.readouterr().err
        writer.step(0, record(1))
    with Session.open(target) as session:
        assert state_of(session) == "closed"
        assert session.steps() == range(2)
    with Session.open(kept / "growing.session") as session:
        assert session.steps() == range(2)
