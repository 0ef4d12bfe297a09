"""`lockstep sessions`: what it reports of recordings that are not whole, and how it copies and removes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lockstep.sessions import Session
from lockstep.sessions.format import files
from lockstep.sessions.state import state_of
from lockstep.workbench.cli.main import run
from lockstep.workbench.models.identify import identify
from lockstep.workbench.paths import find_session, session_of
from lockstep.workbench.views.overview import overview
from lockstep.workbench.views.source import SessionSource
from tests.sessions.samples import as_version, create, record, write


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
        assert run(["sessions", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert run(["sessions"]) == 0
        shown = capsys.readouterr().out
        assert run(["sessions", "show", "killed"]) == 0
        assert "state: ended without closing" in capsys.readouterr().out
    assert "ended without closing" in next(line for line in shown.splitlines() if "killed" in line)
    assert "being recorded" in next(line for line in shown.splitlines() if "growing" in line)
    assert {row["name"]: row["state"] for row in rows} == {
        "closed": "closed", "growing": "recording", "killed": "interrupted", "lone": "incomplete"
    }  # fmt: skip


def test_what_can_be_read_is_salvaged(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with create(kept / "growing.session") as writer:
        writer.step(0, record(0))
        shutil.copy(kept / "growing.session", kept / "lone.session")
    target = str(kept / "whole.session")
    assert run(["sessions", "copy", "lone", target]) == 3
    assert "sessions copy --salvage" in capsys.readouterr().err
    assert run(["sessions", "copy", "--salvage", "lone", target]) == 0
    assert "The original is incomplete: the log lone.session-wal" in capsys.readouterr().out
    assert run(["sessions", "verify", "whole"]) == 0


def test_ok_is_reported_of_what_was_proved(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_session_is_found_by_the_name_that_the_list_shows(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[Path] = []
    monkeypatch.setattr("lockstep.workbench.cli.tui.no_screens", lambda: "")
    monkeypatch.setattr("lockstep.workbench.tui.launch.run_session", lambda path: opened.append(path) or 0)
    path = kept / "closed.session"
    for name in ("closed", "closed.session", str(path)):
        assert run(["sessions", "show", name]) == 0
        assert run(["replay", name, "--batch", "--ex", "where"]) == 0
        assert run(["tui", name]) == 0
        assert run(["diff", name, str(path)]) == 0
        assert run(["export", name, "--csv", str(tmp_path / "a.csv")]) == 0
        assert identify(name).path == path
    assert opened == [path] * 3
    shutil.copy(path, tmp_path / "closed")  # a path comes first
    monkeypatch.chdir(tmp_path)
    assert find_session("closed") == Path("closed")
    assert session_of("demo") is None
    capsys.readouterr()
    assert run(["replay", "nowhere", "--ex", "where"]) == 3
    assert "nowhere" in capsys.readouterr().err


def test_every_action_on_sessions_answers_in_json(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = (kept / "closed.session").stat().st_size
    copied = str(tmp_path / "copied.session")
    for words, key, value in (
        (["show", "closed"], "state", "closed"),
        (["copy", "closed", copied], "copy", copied),
        (["pack", "closed"], "before", size),
        (["pack", "closed"], "converted", False),
        (["rm", "--yes", "closed"], "removed", str(kept / "closed.session")),
    ):
        assert run(["sessions", *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[key] == value
    assert run(["sessions", "--json", "show", copied]) == 2
    assert "put --json behind show" in capsys.readouterr().err


def test_packing_reports_what_it_did(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for reported in (" → 36864 bytes", "left as it is, 36864 bytes: packed it would not be smaller"):
        assert run(["sessions", "pack", "closed"]) == 0
        assert reported in capsys.readouterr().out
    as_version(write(kept / "old.session", 2), 2)
    assert run(["sessions", "pack", "old"]) == 0
    assert "converted to the present format, 262144 → " in capsys.readouterr().out


def test_the_log_of_another_session_is_reported_of(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`mv closed.session run.session`, where the log of a killed run lies."""
    with create(kept / "growing.session") as writer:
        writer.step(0, record(0))
        shutil.copy(files.wal_of(writer.path), kept / "run.session-wal")
    (kept / "closed.session").rename(kept / "run.session")
    note = "run.session-wal is the log of another session"
    for command in (["show", "run"], ["verify", "run"]):
        assert run(["sessions", *command]) == 0
        assert note in capsys.readouterr().out
    assert run(["replay", str(kept / "run.session"), "--ex", "where", "--batch"]) == 0
    assert f"note: {note}" in capsys.readouterr().err
    with Session.open(kept / "run.session") as session:
        assert overview(SessionSource(session)).lost.startswith(note)
    assert run(["sessions", "pack", "run", "--json"]) == 0
    packed = json.loads(capsys.readouterr().out)
    assert packed["set_aside"] == str(kept / "run.session-other-wal")
    with Session.open(kept / "run.session") as session:
        assert session.steps() == range(2)
