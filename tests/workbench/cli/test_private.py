"""What Lockstep keeps of its own is for its user alone; an export follows the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.sessions.format.files import mode_of
from lockstep.workbench import error_log
from lockstep.workbench.cli.main import run
from lockstep.workbench.cli.prompt import history
from lockstep.workbench.paths import new_session_path
from lockstep.workbench.references import cache
from lockstep.workbench.tui import settings
from tests.workbench.export import made


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home that has nothing yet, and the usual umask."""
    for variable in ("LOCKSTEP_DATA_DIR", "LOCKSTEP_CACHE_DIR", "LOCKSTEP_STATE_DIR"):
        monkeypatch.delenv(variable)
    for variable, place in (("DATA", "share"), ("CACHE", "cache"), ("STATE", "state"), ("CONFIG", "config")):
        monkeypatch.setenv(f"XDG_{variable}_HOME", str(tmp_path / place))
    before = os.umask(0o022)
    yield tmp_path
    os.umask(before)


def test_folders_and_files_are_private(home: Path) -> None:
    made.build(new_session_path("run"))
    cache.folder().close()
    error_log.record(ValueError("of somebody's prompt"))
    settings.remember(home)
    settings.save("theme", "lockstep-light")
    history().append_string("print x")
    found = {str(path.relative_to(home)): mode_of(path) for path in home.rglob("*")}
    assert {"share/lockstep/sessions", "share/lockstep/history", "cache/lockstep/golden", "state/lockstep/errors.log",
            "state/lockstep/recent.json", "config/lockstep/config.toml"} < found.keys()  # fmt: skip
    assert any(name.endswith(".session") for name in found)
    assert {name: f"{mode:o}" for name, mode in found.items() if mode & 0o077} == {}


def test_settings_keep_the_mode_that_they_were_given(home: Path) -> None:
    settings.save("theme", "lockstep-light")
    settings.config_file().chmod(0o644)
    settings.save("theme", "lockstep-dark")
    assert mode_of(settings.config_file()) == 0o644


def test_an_export_follows_the_umask(home: Path) -> None:
    session = made.build(home / "a.session")
    os.umask(0o027)
    assert (
        run(["export", str(session), "--csv", str(home / "out.csv"), "--json", str(home / "out.json")]) == 0
    )
    assert mode_of(home / "out.csv") == mode_of(home / "out.json") == 0o640
