"""The palette has every command of the debugger with its help, and is searched by the words of both."""

from __future__ import annotations

from textual.command import CommandPalette, Hit
from textual.pilot import Pilot
from textual.widgets import Input

from lockstep.engine.faults.catalogue import FAULTS
from lockstep.workbench.debugger.core.registry import commands
from lockstep.workbench.tui.palette import PaletteEntries
from lockstep.workbench.tui.widgets.command_line import CommandLine
from tests.workbench.tui.conftest import Bench, press, settle, text_of


async def _found(pilot: Pilot[int], query: str) -> list[str]:
    """The texts of the hits, the best first."""
    provider = PaletteEntries(pilot.app.screen)
    hits = [hit async for hit in provider.search(query)]
    assert all(isinstance(hit, Hit) for hit in hits)
    return [str(hit.text) for hit in sorted(hits, key=lambda hit: hit.score, reverse=True)]


async def test_every_command_is_found_by_its_name_and_by_its_help(bench: Bench) -> None:
    async with bench() as pilot:
        offered = {one.title: one.help for one in pilot.app.get_system_commands(pilot.app.screen)}
        for one in commands().values():
            assert one.help in offered[f":{one.usage}"]
        assert (await _found(pilot, "catch"))[0].startswith(":catch")
        assert any(one.startswith(":catch") for one in await _found(pilot, "something wrong"))
        titles = [f"Toggle: {fault.title}" for fault in FAULTS if "bias" in fault.title]
        assert titles
        assert set(titles) <= set(await _found(pilot, "bias"))
        assert await _found(pilot, "no such words") == []


async def test_a_command_comes_onto_the_line_with_its_brackets_on_screen(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "ctrl+p")
        assert isinstance(pilot.app.screen, CommandPalette)
        assert any("words of a command, a pane, a toggle, or of its help" in line for line in text_of(pilot))
        pilot.app.screen.query_one(Input).value = "stop at taps once"
        for _ in range(100):
            await pilot.pause(0.05)
            if any(":tbreak LOCATION [if CONDITION]" in line for line in text_of(pilot)):
                break
        assert any("stop at taps, once" in line for line in text_of(pilot))
        await press(pilot, "enter")
        await settle(pilot)
        line = pilot.app.screen.query_one(CommandLine)
        assert (line.has_focus, line.value) == (True, "tbreak ")
