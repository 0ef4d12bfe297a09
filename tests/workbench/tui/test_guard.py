"""The outer net of the screens: whatever fails is reported and logged, the program and its parts go on."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from lockstep.sessions import Session
from lockstep.workbench import error_log
from lockstep.workbench.tui.app import LockstepApp
from lockstep.workbench.tui.launch import _run, run_session
from lockstep.workbench.tui.panes.attention import AttentionPane
from lockstep.workbench.tui.panes.operations import OperationsPane
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen
from lockstep.workbench.tui.widgets.status_line import StatusLine
from lockstep.workbench.tui.widgets.token_strip import TokenStrip
from tests.workbench.tui.conftest import Bench, press, settle, text_of

pytestmark = pytest.mark.sampled_file(2)

#: What a stranger's value may be that an exception quotes.
EVIL = "[/bold] [link=http://evil.example]x \x1b[31mred \u202e"


@pytest.fixture
def netted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program as its users have it."""
    monkeypatch.delenv("LOCKSTEP_DEBUG")


def fails(*arguments: Any, **named: Any) -> Any:
    """In place of anything."""
    raise ValueError(EVIL)


def log() -> str:
    return error_log.log_file().read_text(encoding="utf-8")


def notices(pilot: Pilot[int]) -> list[str]:
    return [notice.message for notice in pilot.app._notifications]


async def goes_on(pilot: Pilot[int]) -> None:
    """The failure is reported as it is, and the keys and panes work as before."""
    (notice,) = notices(pilot)
    assert "ValueError" in notice
    assert "[/bold]" in notice
    assert "\x1b" not in notice
    assert str(error_log.log_file()) in notice
    await press(pilot, "8")
    assert any("run demo" in row for row in text_of(pilot))
    await press(pilot, "left_square_bracket")
    assert pilot.app.is_running
    assert pilot.app.return_code is None


@pytest.mark.usefixtures("netted")
async def test_a_worker(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionPane, "question", lambda pane: (fails, ()))
    async with bench() as pilot:
        await press(pilot, "2")
        assert any("This cannot be shown: ValueError: [/bold]" in row for row in text_of(pilot))
        await goes_on(pilot)
    assert "in fails" in log()
    assert "\x1b" not in log()
    assert stat.S_IMODE(error_log.log_file().stat().st_mode) == 0o600


@pytest.mark.usefixtures("netted")
async def test_a_key_and_a_message(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message loop of the app, and that of the screen, outlive what they could not handle."""
    async with bench() as pilot:
        with monkeypatch.context() as patched:
            patched.setattr(LockstepApp, "_check_bindings", fails)
            await press(pilot, "2")
        await goes_on(pilot)
    async with bench() as pilot:
        screen = pilot.app.screen
        assert isinstance(screen, WorkbenchScreen)
        with monkeypatch.context() as patched:
            patched.setattr(screen.navigator, "nearest", fails)
            pilot.app.screen.post_message(OperationsPane.Go(step=0))
            await settle(pilot)
        await goes_on(pilot)
        assert "WorkbenchScreen handled Go" in log()
        screen.post_message(OperationsPane.Go(step=2))
        await settle(pilot)
        assert screen.where.step == 2


class PanicException(BaseException):
    """As libraries in Rust throw it: no Exception."""


def panics(*arguments: Any, **named: Any) -> Any:
    """In place of anything."""
    raise PanicException("index out of bounds")


@pytest.mark.usefixtures("netted")
async def test_a_library_that_panics(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the message loop, on the reader's thread, and where something is drawn."""
    for owner, name in ((LockstepApp, "_check_bindings"), (Session, "view"), (TokenStrip, "line")):
        async with bench() as pilot:
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, panics)
                pilot.app.screen.query_one(TokenStrip).refresh()
                await press(pilot, "2", "right_square_bracket")
            assert any("LibraryPanic: PanicException" in reported for reported in notices(pilot)), name
            await press(pilot, "8")
            assert pilot.app.is_running
            assert pilot.app.return_code is None
    assert "PanicException: index out of bounds" in log()


@pytest.mark.usefixtures("netted")
async def test_a_timer_and_a_callback(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as pilot:
        timer = pilot.app.screen.set_interval(0.01, fails)
        await pilot.pause(0.2)
        timer.stop()
        await goes_on(pilot)
    assert log().count("Traceback") == 1  # it ran many times
    async with bench() as pilot:
        pilot.app.screen.call_next(fails)
        pilot.app._loop.call_soon(fails)
        await settle(pilot)
        await goes_on(pilot)


@pytest.mark.usefixtures("netted")
async def test_what_cannot_be_drawn_states_that_and_is_reported_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench() as pilot:
        monkeypatch.setattr(TokenStrip, "line", fails)
        for _ in range(20):
            pilot.app.screen.query_one(TokenStrip).refresh()
            await pilot.pause()
        shown = text_of(pilot)
        assert any(row.startswith(" ✗ cannot be drawn: ValueError: [/bold]") for row in shown)
        assert any("embed" in row for row in shown), "the panes are drawn"
        await goes_on(pilot)
    assert log().count("Traceback") == 1


@pytest.mark.usefixtures("netted")
async def test_one_who_tries_again_is_reported_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as pilot:
        monkeypatch.setattr(WorkbenchScreen, "action_view", fails)
        await press(pilot, "z", "z")
        assert len(notices(pilot)) == 2
    assert log().count("Traceback") == 1


async def test_a_developer_has_the_traceback(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCKSTEP_DEBUG is set in the tests of the screens: nothing that fails is hidden from them."""
    monkeypatch.setattr(StatusLine, "line", fails)
    with pytest.raises(ValueError, match=r"\[/bold\]"):
        async with bench():
            pass


@pytest.mark.usefixtures("netted")
def test_a_first_screen_that_fails_ends_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = LockstepApp.run
    monkeypatch.setattr(LockstepApp, "run", lambda app: run(app, headless=True))
    assert _run(fails) == 70
    assert f"see {error_log.log_file()}" in capsys.readouterr().err


def test_the_log_is_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_log, "_MOST_BYTES", 10_000)
    for _ in range(200):
        try:
            fails()
        except ValueError as error:
            reported = error_log.record(error)
    file = error_log.log_file()
    assert reported == f"is in {file}"
    assert sorted(path.name for path in file.parent.iterdir()) == ["errors.log", "errors.log.1"]
    assert all(path.stat().st_size < 12_000 for path in file.parent.iterdir())


def test_a_log_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOCKSTEP_STATE_DIR", str(tmp_path / "file"))
    assert "could not be kept" in error_log.record(ValueError("x"))


@pytest.mark.usefixtures("netted")
@pytest.mark.parametrize(("defect", "code"), [(False, 3), (True, 70)])
def test_a_session_that_cannot_be_opened_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    defect: bool,
    code: int,
) -> None:
    """Its name is no markup; a defect is reported as one, and logged."""
    path = tmp_path / "[red][x\x1b[2J].session"
    path.write_bytes(b"no session")
    if defect:
        monkeypatch.setattr(Reader, "open", fails)
    run = LockstepApp.run
    monkeypatch.setattr(LockstepApp, "run", lambda app: run(app, headless=True))
    assert run_session(path) == code
    reported = capfd.readouterr().err
    assert "[red][x?[2J]" in reported.replace("\n", "")
    assert "\x1b" not in reported
    assert ("ValueError" in reported) == ("see " in reported) == error_log.log_file().exists() == defect
