"""What a user does while the screens follow the debugger is not taken back, and every key reaches the pane in front."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from textual import events
from textual.pilot import Pilot
from textual.widget import Widget

from lockstep.workbench.export.pooling import pool
from lockstep.workbench.tui.navigator import updated
from lockstep.workbench.tui.panes.base import Pane
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen
from lockstep.workbench.tui.widgets.command_line import CommandLine
from lockstep.workbench.tui.widgets.grid import Grid
from lockstep.workbench.tui.widgets.multiples import Multiples, Tiles
from lockstep.workbench.views.where import Where
from tests.workbench.tui.conftest import Bench, press, settle, until

pytestmark = pytest.mark.sampled_file(2)


def _screen(pilot: Pilot[int]) -> WorkbenchScreen:
    assert isinstance(pilot.app.screen, WorkbenchScreen)
    return pilot.app.screen


def test_what_was_chosen_while_a_place_was_read_is_kept() -> None:
    before = Where(step=3, tap=7)
    assert updated(Where(step=4, tap=7), before, before, ("tap", "rank")) == Where(step=4, tap=7)
    now = Where(step=2, tap=8, rank=1)
    assert updated(Where(step=4, tap=7), before, now, ("tap", "rank")) == Where(step=4, tap=8, rank=1)


@pytest.mark.parametrize("back", [False, True])
async def test_a_cursor_that_moves_while_the_debugger_is_followed_stays(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    async with bench() as pilot:
        await press(pilot, "N")  # now the debugger stands somewhere
        screen = _screen(pilot)
        grid = screen.query_one("#operations", Grid)
        reads, read = asyncio.Event(), asyncio.Event()
        nearest = screen.navigator.nearest

        async def slow(where: Where) -> Where:
            reads.set()
            await read.wait()
            return await nearest(where)

        monkeypatch.setattr(screen.navigator, "nearest", slow)
        following = asyncio.create_task(screen.follower.follow(back=back))
        await asyncio.wait_for(reads.wait(), 20)
        row = grid.cursor
        await pilot.press("down")
        await pilot.pause()
        assert grid.cursor == row + 1
        read.set()
        await following
        await settle(pilot)
        assert grid.cursor == row + 1


async def test_a_cursor_on_the_heading_of_a_layer_stays_there_when_the_step_changes(bench: Bench) -> None:
    async with bench() as pilot:
        grid = _screen(pilot).query_one("#operations", Grid)
        await press(pilot, "down")  # from the embedding onto the heading of layer 0
        assert grid.cursor == 1
        await press(pilot, "left_square_bracket")
        assert grid.cursor == 1
        await press(pilot, "down", "left_square_bracket")
        assert (grid.cursor, _screen(pilot).where.tap) == (2, 1)


async def test_a_pane_that_was_left_while_its_content_came_takes_no_keys(bench: Bench) -> None:
    async with bench() as pilot:
        screen = _screen(pilot)
        await press(pilot, "5")
        assert screen.front is not None
        screen.front.empty("There is nothing here.")
        screen.front.filled()
        await screen.show_pane(1)
        await settle(pilot)
        assert screen.focused is screen.query_one("#operations", Grid)
        await press(pilot, "down")
        assert screen.query_one("#operations", Grid).cursor == 1


async def test_a_key_that_nothing_took_does_not_act_on_what_has_the_focus_later(bench: Bench) -> None:
    async with bench() as pilot:
        screen = _screen(pilot)
        assert screen.focused is screen.query_one("#operations", Grid)
        late = events.Key("enter", None)
        late._set_forwarded()  # as it comes back to the app from a widget that had the focus when it was pressed
        pilot.app.post_message(late)
        await settle(pilot)
        assert screen.pane == 1
        await press(pilot, "enter")
        assert screen.pane == 9, "it acts where it is pressed"


async def test_a_line_that_is_typed_keeps_the_keys_when_content_comes(bench: Bench) -> None:
    async with bench() as pilot:
        screen = _screen(pilot)
        assert screen.front is not None
        screen.front.empty("There is nothing here.")
        await settle(pilot)
        screen.front.filled()
        screen.actions.command_line("goto 1")
        await settle(pilot)
        assert screen.focused is screen.query_one(CommandLine)


async def test_a_line_that_is_opened_again_at_once_keeps_the_keys(bench: Bench) -> None:
    async with bench() as pilot:
        line = _screen(pilot).query_one(CommandLine)
        line.open("where")
        line.action_close()
        line.open("goto 1")
        await settle(pilot)
        assert _screen(pilot).focused is line


async def test_going_through_former_lines_keeps_the_one_that_is_typed(bench: Bench) -> None:
    async with bench() as pilot:
        line = _screen(pilot).query_one(CommandLine)
        line.open()
        await press(pilot, *"goto", "down")
        assert line.value == "goto"
        await press(pilot, "space", "1", "enter", "colon", *"wh", "up")
        assert line.value == "goto 1"
        await press(pilot, "down")
        assert line.value == "wh"


async def test_the_text_around_a_pane_is_not_laid_out_anew_at_every_step(bench: Bench) -> None:
    async with bench() as pilot:
        laid_out = []
        _screen(pilot).screen_layout_refresh_signal.subscribe(pilot.app, laid_out.append)
        await press(pilot, "left_square_bracket", "left_square_bracket")
        assert laid_out == []


async def test_heads_are_not_drawn_again_when_only_labels_came(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "2")
        screen = _screen(pilot)
        tiles = screen.query_one(Multiples)
        drawn = tiles._drawn
        assert drawn
        assert screen.front is not None
        screen.front.watch_line()
        await settle(pilot)
        assert tiles._drawn is drawn


def test_tiles_are_equal_where_they_show_the_same_array_alike() -> None:
    values = np.zeros((2, 3, 3), np.float32)
    assert Tiles(values, ("a", "b"), (0, 1)) == Tiles(values, ("a", "b"), (0, 1))
    assert Tiles(values, ("a", "b"), (0, 1)) != Tiles(values, ("a", "c"), (0, 1))
    assert Tiles(values, ("a", "b"), (0, 1)) != Tiles(values.copy(), ("a", "b"), (0, 1))


@pytest.mark.parametrize("shape", [(3, 40, 60), (3, 5, 4), (3, 40, 2), (1, 1, 1)])
def test_matrices_that_are_pooled_at_once_are_as_each_by_itself(shape: tuple[int, int, int]) -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=shape).astype(np.float32)
    values[0, -1, 0], values[0, 0, -1] = np.nan, -np.inf
    several = pool(values, 12, 16, masked=True)
    for one, drawn, kind in zip(values, several.values, several.kind, strict=True):
        alone = pool(one, 12, 16, masked=True)
        assert np.array_equal(alone.values, drawn)
        assert np.array_equal(alone.kind, kind)
        assert (alone.rows.tolist(), alone.pooled) == (several.rows.tolist(), several.pooled)


async def test_a_pane_that_was_asked_for_before_there_is_any_stays(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a key while the first step of a run ends, when the first pane comes to the front by itself."""
    async with bench() as pilot:
        panes = _screen(pilot).panes
        panes.front = None
        may_be_made, asked = asyncio.Event(), list[int]()
        bring, add = panes.bring, panes.add_content

        async def noted(number: int) -> Pane:
            asked.append(number)
            return await bring(number)

        async def slow(made: Widget) -> None:
            await may_be_made.wait()
            await add(made)

        monkeypatch.setattr(panes, "bring", noted)
        monkeypatch.setattr(panes, "add_content", slow)
        chosen = asyncio.create_task(_screen(pilot).show_pane(2))
        await until(lambda: len(asked) == 1, pilot)
        following = asyncio.create_task(_screen(pilot).follower.follow())
        await until(lambda: len(asked) == 2, pilot)
        may_be_made.set()
        await asyncio.gather(chosen, following)
        assert _screen(pilot).pane == 2
        assert panes.current == "pane-2"
