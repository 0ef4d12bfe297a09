"""The settings file: what reading a session may cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.sessions.limits import DEFAULT, ReadLimits
from lockstep.workbench import settings
from lockstep.workbench.settings import SettingsError, session_limits
from lockstep.workbench.tui.settings import load


def test_the_defaults_hold_where_nothing_is_set(tmp_path: Path) -> None:
    assert session_limits(tmp_path / "config.toml") == DEFAULT == ReadLimits(512 << 20, 10.0)


def test_what_is_set_is_used_by_commands_and_screens(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("session_memory = 64\nsession_seconds = 2.5\n")
    assert session_limits(file) == ReadLimits(64 << 20, 2.5)
    load(file)


@pytest.mark.parametrize(
    "line",
    [
        "session_memory = 0",
        "session_memory = 'much'",
        "session_seconds = -1",
        "session_seconds = true",
        "x =",
    ],
)
def test_nonsense_is_refused_by_name(tmp_path: Path, line: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(line)
    for read in (session_limits, load):
        with pytest.raises(SettingsError, match=r"config\.toml: (session_|not valid TOML)"):
            read(file)


def test_every_command_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit that nothing fits into is reported by each command that opens a session."""
    from lockstep.workbench.cli.main import run
    from tests.sessions.samples import write

    path, other = write(tmp_path / "a.session", 2), write(tmp_path / "b.session", 2)
    file = tmp_path / "config.toml"
    file.write_text("session_memory = 0.001\n")
    monkeypatch.setattr(settings, "config_file", lambda: file)
    for words in (
        ["sessions", "show", str(path)],
        ["diff", str(path), str(other)],
        ["export", str(path), "--json", str(tmp_path / "out.json")],
        ["replay", str(path), "--ex", "branches"],
    ):
        assert run(words) == 3, words
        assert "`session_memory` in config.toml" in capsys.readouterr().err
    assert run(["sessions", "verify", str(path)]) == 1
    assert "`session_memory` in config.toml" in capsys.readouterr().out
