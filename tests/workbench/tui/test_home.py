"""The home screen, and the way from it into a session."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path

import pytest

from lockstep.workbench.models import identify
from lockstep.workbench.tui import routes, settings
from lockstep.workbench.tui.app import LockstepApp
from lockstep.workbench.tui.screens.home import HomeScreen
from lockstep.workbench.tui.screens.machine import machine_lines
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen
from tests.workbench.tui.conftest import press, settle, text_of

pytestmark = pytest.mark.sampled_file(2)


@pytest.fixture(autouse=True)
def _no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_DATA_DIR", str(tmp_path / "data"))


async def test_recent_sessions_are_listed_and_opened(session: Path) -> None:
    settings.remember(session)
    app = LockstepApp(lambda chosen: HomeScreen(examine=False))
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        assert any("haiku.session" in line and "2 branches" in line for line in text_of(pilot))
        await press(pilot, "down", "down", "enter")
        await settle(pilot)
        assert isinstance(app.screen, WorkbenchScreen)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_gallery_is_there_before_anything_was_opened(size: tuple[int, int]) -> None:
    app = LockstepApp(lambda chosen: HomeScreen(examine=False))
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        shown = text_of(pilot)
        assert any("recorded bugs" in line for line in shown)
        assert any("cache_heads-repeated " in line and "Empty lines, then" in line for line in shown)
        await press(pilot, "down", "down", "down", "enter")
        assert isinstance(app.screen, WorkbenchScreen)
        assert "cache_reuse=false" in "\n".join(text_of(pilot)[:3])


async def test_a_description_uses_the_room_there_is_and_is_read_whole_where_it_is_cut() -> None:
    whole = "Fluent at first sight, but no sentence ends and nothing answers the question."
    for size, cut in (((130, 40), False), ((80, 24), True)):
        app = LockstepApp(lambda chosen: HomeScreen(examine=False))
        async with app.run_test(size=size) as pilot:
            await settle(pilot)
            await press(pilot, *["down"] * 5)
            shown = [line for line in text_of(pilot) if "Fluent at first sight" in line]
            assert "▸ load_bias-false" in shown[0]
            assert (whole not in shown[0]) == cut
            assert [line.strip() for line in shown[1:]] == ([whole] if cut else [])


async def test_a_narrow_home_screen_has_room_for_ages_and_both_ends_of_names(
    session: Path, tmp_path: Path
) -> None:
    named = tmp_path / "demo-20261124-124241-28903-or-another.session"
    shutil.copy(session, named)
    settings.remember(named)
    app = LockstepApp(lambda chosen: HomeScreen(examine=False))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        (line,) = (line for line in text_of(pilot) if "Demo-3.5M: 12 steps, 2" in line)
        assert re.search(r"demo-20261\S*…\S*her\.session ", line)
        assert line.endswith(("just now", " ago"))


async def test_an_answer_that_comes_late_does_not_replace_a_newer_one(
    session: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun, newer = identify.identify, threading.Event(), threading.Event()

    def slow(text: str) -> identify.Found:
        found = real(text)
        if not text:
            begun.set()
            newer.wait(20)
        return found

    monkeypatch.setattr(identify, "identify", slow)
    app = LockstepApp(lambda chosen: HomeScreen(examine=False))
    async with app.run_test(size=(100, 30)) as pilot:
        assert isinstance(app.screen, HomeScreen)
        app.screen.action_open()
        while not begun.is_set():
            await pilot.pause(0.01)
        app.screen.query_one("#open").open("/nowhere")
        while not any("there is no /nowhere" in line for line in text_of(pilot)):
            await pilot.pause(0.02)
        newer.set()
        for _ in range(20):  # the late one is handed over by its thread
            await pilot.pause(0.01)
        assert any("there is no /nowhere" in line for line in text_of(pilot))


async def test_what_is_typed_is_checked_and_opened(session: Path) -> None:
    app = LockstepApp(lambda chosen: HomeScreen(examine=False))
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await press(pilot, "o", *"/nowhere")
        assert any("there is no /nowhere" in line for line in text_of(pilot))
        await press(pilot, "escape")
        app.screen.query_one("#open").open("gallery/mask_additive")
        await settle(pilot)
        assert any("did you mean gallery/mask-additive?" in line for line in text_of(pilot))
        await press(pilot, "escape")
        app.screen.query_one("#open").open("gallery/mask-add")
        await press(pilot, "tab")
        assert any("demo: 12 steps, 2 ranks, 2 branches" in line for line in text_of(pilot))
        await press(pilot, "escape")
        app.screen.query_one("#open").open(str(session)[:-3])
        await press(pilot, "tab")
        assert any("12 steps" in line for line in text_of(pilot))
        await press(pilot, "enter")
        await settle(pilot)
        assert isinstance(app.screen, WorkbenchScreen)


async def test_a_file_that_is_no_session_ends_with_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.session"
    bad.write_text("no database")
    app = LockstepApp(routes.session(bad))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
    assert app.return_code == 3


def test_machine_problems_are_reported_and_health_is_one_line() -> None:
    good = machine_lines(b'[{"what": "python", "level": "ok", "found": "3.11"}]')
    assert "everything" in good[0][1][0]
    bad = machine_lines(b'[{"what": "gloo", "level": "bad", "found": "missing", "advice": "install torch"}]')
    assert "gloo: missing" in bad[0][1][0]
    assert "lockstep doctor" in machine_lines(b"")[0][1][0]


async def test_themes_change_and_are_remembered() -> None:
    app = LockstepApp(lambda chosen: HomeScreen(examine=False))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        app.theme = "lockstep-light"
        await settle(pilot)
    assert settings.load().theme == "lockstep-light"


async def test_a_long_name_is_whole_where_there_is_room(session: Path, tmp_path: Path) -> None:
    named = tmp_path / "demo-20261124-124241-28903.session"
    shutil.copy(session, named)
    settings.remember(named)
    app = LockstepApp(lambda chosen: HomeScreen(examine=False))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert any(named.name in line for line in text_of(pilot))
