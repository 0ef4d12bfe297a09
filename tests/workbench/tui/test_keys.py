"""The keys of the workbench are the registry's, and those of the view."""

from __future__ import annotations

from tests.workbench.tui.conftest import Bench, enter, press, text_of
from workbench.debugger.commands import all as _  # noqa: F401 - fills the registry
from workbench.debugger.core.registry import commands, parse_line
from workbench.tui import keys
from workbench.tui.screens.view_actions import ViewActions
from workbench.tui.screens.workbench import WorkbenchScreen


def test_every_key_means_one_thing() -> None:
    found = keys.keys_of(commands().values())
    presses = [key.press for key in found]
    assert len(set(presses)) == len(presses)
    assert {"n", "N", "s", "S", "i", "I", "c", "C", "f", "b", "B", "g", "o", "x", "ctrl+c"} <= set(presses)


def test_a_commands_key_runs_that_command() -> None:
    for one in commands().values():
        if one.key is not None and one.key.line:
            assert parse_line(one.key.line)[0] is one


def test_every_key_of_the_view_has_its_action() -> None:
    for key in keys.VIEW_KEYS:
        name = key.action.removeprefix("view('").partition("'")[0]
        assert callable(getattr(ViewActions, name)), key


async def test_keys_in_a_replay_are_the_debuggers_commands(bench: Bench) -> None:
    async with bench() as pilot:
        screen = pilot.app.screen
        assert isinstance(screen, WorkbenchScreen)
        ran: list[str] = []
        carry_out = screen.driver.run

        async def run(line, where):
            ran.append(line)
            return await carry_out(line, where)

        screen.driver.run = run
        await press(pilot, "N", "n", "s", "i", "I", "S", "f", "C", "c", "b", "B", "escape", "o")
        lines = {key.press: key.line for key in screen.keymap.keys}
        present = screen.overview.taps[screen.where.tap]
        expected = [lines[key] for key in ("N", "n", "s", "i", "I", "S", "f", "C", "c", "b", "B", "o")]
        assert [line.split()[0] for line in ran] == [line.split()[0] for line in expected]
        assert ran[10] == "info breakpoints"
        assert present


async def test_steps_follow_each_other_operation_by_operation_in_a_replay(bench: Bench) -> None:
    async with bench() as pilot:
        screen = pilot.app.screen
        assert isinstance(screen, WorkbenchScreen)
        assert screen.overview is not None
        taps = screen.overview.taps
        await enter(pilot, "colon", f"goto 3 {taps[-1]}")
        await press(pilot, "i")
        assert (screen.where.step, screen.where.tap) == (4, 0)
        await press(pilot, "I")
        assert (screen.where.step, taps[screen.where.tap]) == (3, taps[-1])
        await press(pilot, "s")
        assert (screen.where.step, screen.where.tap) == (4, 0)
        await press(pilot, "S")
        assert screen.where.step == 3
        seen = []
        await press(pilot, "[")
        for _ in range(3):
            await press(pilot, "s")
            seen.append(taps[screen.where.tap])
        assert screen.where.step in (2, 3)
        await press(pilot, "n")
        assert screen.where.step > 2


async def test_the_last_step_has_no_next_and_the_first_none_before(bench: Bench) -> None:
    async with bench() as pilot:
        screen = pilot.app.screen
        assert isinstance(screen, WorkbenchScreen)
        assert screen.overview is not None
        last = len(screen.overview.taps) - 1
        await enter(pilot, "colon", f"goto 11 {screen.overview.taps[last]}")
        await press(pilot, "i", "i", "s")
        assert (screen.where.step, screen.where.tap) == (11, last)
        assert any("end of the recording" in line for line in text_of(pilot))
        await enter(pilot, "colon", "goto 0 embed")
        await press(pilot, "I", "I", "N")
        assert (screen.where.step, screen.where.tap) == (0, 0)
        assert any("the beginning" in line for line in text_of(pilot))
        await press(pilot, "i")
        assert (screen.where.step, screen.where.tap) == (0, 1)


async def test_a_key_typed_before_the_commands_are_known_acts_later(bench: Bench) -> None:
    async with bench() as pilot:
        screen = pilot.app.screen
        assert isinstance(screen, WorkbenchScreen)
        fresh = WorkbenchScreen(screen.reader, type(screen.driver)(screen.reader.source.path))
        await pilot.app.push_screen(fresh)
        await pilot.press("N", "N")
        for _ in range(200):
            if fresh.where.step == 9:
                break
            await pilot.pause(0.05)
        assert fresh.where.step == 9
