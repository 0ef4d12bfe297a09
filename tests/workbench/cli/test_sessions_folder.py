"""`lockstep sessions` and the home screen on a folder in which not everything is a session."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lockstep.sessions import Session
from lockstep.workbench.cli.main import run
from lockstep.workbench.paths import sessions_directory
from lockstep.workbench.references.cache import prune
from lockstep.workbench.tui.app import LockstepApp
from lockstep.workbench.tui.screens.home import HomeScreen
from tests.sessions.samples import write
from tests.workbench.tui.conftest import settle, text_of
from tests.workbench.unprivileged import unprivileged


@pytest.fixture
def litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A session, and whatever else may be called one."""
    monkeypatch.setenv("LOCKSTEP_DATA_DIR", str(tmp_path))
    folder = sessions_directory()
    write(folder / "good.session", 2)
    (folder / "dangling.session").symlink_to(tmp_path / "nowhere")
    (folder / "loop.session").symlink_to(folder / "loop.session")
    (folder / "linked.session").symlink_to(folder / "good.session")
    os.mkfifo(folder / "pipe.session")
    (folder / "folder.session").mkdir()
    (folder / "empty.session").touch()
    write(folder / "log.session", 2)
    (folder / "log.session-wal").symlink_to(tmp_path / "nowhere")
    return folder


def test_each_is_listed_as_what_it_is(litter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sessions", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    stated = {"dangling": "a link", "loop": "a link", "linked": "a link", "pipe": "no regular file",
            "folder": "a directory", "empty": "no SQLite 3 database", "log": "a link"}  # fmt: skip
    assert rows.keys() == {"good", *stated}
    assert (rows["good"]["state"], rows["good"]["steps"]) == ("closed", 2)
    for name, words in stated.items():
        assert rows[name]["state"] == "unreadable"
        assert words in rows[name]["model"], rows[name]
    assert run(["sessions"]) == 0
    assert "it is a link" in capsys.readouterr().out


def test_what_vanishes_while_it_is_listed_is_left_out(
    litter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is looked at, and before it is opened."""
    names, opened = os.listdir, Session.open

    def listed(folder: Path) -> list[str]:
        found = names(folder)
        (litter / "empty.session").unlink()
        return found

    def vanished(path: Path, *limits: object) -> Session:
        if path.is_file() and not path.is_symlink():
            path.rename(litter / "away")
        return opened(path, *limits)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "listdir", listed)
    monkeypatch.setattr(Session, "open", vanished)
    assert run(["sessions", "--json"]) == 0
    names_left = {row["name"] for row in json.loads(capsys.readouterr().out)}
    assert names_left == {"dangling", "loop", "linked", "pipe", "folder"}


async def test_the_home_screen_lists_what_can_be_read(litter: Path) -> None:
    app = LockstepApp(lambda chosen: HomeScreen(examine=False))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert any("good.session" in line and "2 steps" in line for line in text_of(pilot))


def test_old_sessions_are_pruned_beside_what_is_none(litter: Path) -> None:
    prune(litter, keep=litter / "good.session", limit=0)
    assert not (litter / "log.session").exists()
    assert (litter / "dangling.session").is_symlink()
    assert (litter / "good.session").exists()
    assert (litter / "folder.session").is_dir()


def test_what_may_not_be_read_is_reported(litter: Path) -> None:
    (litter / "log.session-wal").unlink()
    (litter / "log.session").chmod(0o000)
    done = unprivileged("sessions", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert (rows["good"]["state"], rows["log"]["state"]) == ("closed", "unreadable")
    assert "Permission denied" in rows["log"]["model"]
    litter.chmod(0o000)
    done = unprivileged("sessions")
    litter.chmod(0o700)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "Permission denied" in done.stderr
