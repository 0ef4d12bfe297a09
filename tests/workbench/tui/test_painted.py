"""Lines that are kept between frames: whatever happens, the screen shows what drawing all of it anew would."""

from __future__ import annotations

import random

import pytest
from rich.segment import Segment
from textual.app import ComposeResult
from textual.pilot import Pilot
from textual.screen import Screen

from lockstep.workbench.tui.app import LockstepApp
from lockstep.workbench.tui.theme import THEMES
from lockstep.workbench.tui.widgets.grid import Grid, GridCell, GridColumn
from lockstep.workbench.tui.widgets.painted import PaintedWidget
from lockstep.workbench.tui.widgets.status_line import Fact, StatusLine
from lockstep.workbench.tui.widgets.text_block import TextBlock

COLUMNS = (
    GridColumn("name", 30),
    GridColumn("value", 6, right=True, drop=1),
    GridColumn("reported", 20, drop=2),
)


class Widgets(Screen[None]):
    """A line of facts, a grid that scrolls, another one, lines."""

    def compose(self) -> ComposeResult:
        yield StatusLine(id="status")
        yield Grid(COLUMNS, id="grid")
        yield Grid(COLUMNS[:1], header=False, id="other")
        yield TextBlock(id="lines")


def shown(pilot: Pilot[int]) -> list[list[Segment]]:
    """Every cell of the screen as the next frame has it: its character and its style."""
    compositor = pilot.app.screen._compositor
    return [
        [Segment(character, segment.style) for segment in strip for character in segment.text]
        for strip in compositor.render_strips()
    ]


def forget(pilot: Pilot[int]) -> None:
    """Drop everything that was kept."""
    for widget in pilot.app.screen.query("*").results(PaintedWidget):
        widget._kept.clear()
        widget._looked_up = ()
        if isinstance(widget, Grid):
            widget._drawn_rows.clear()


async def change(pilot: Pilot[int], chance: random.Random) -> str:
    """Something that happens on a screen."""
    grid, lines = pilot.app.screen.query_one("#grid", Grid), pilot.app.screen.query_one("#lines", TextBlock)
    what = chance.choice(["rows", "cursor", "key", "size", "focus", "theme", "scroll", "lines", "facts"])
    if what == "rows":
        count, salt = chance.randrange(60), chance.randrange(3)

        def row(index: int) -> list[GridCell]:
            role = chance_role(index + salt)
            return [(f"row {index}", role), (str(index * salt), "text"), ("雨 and more of it", "quiet")]

        grid.show(count, row, columns=COLUMNS[: chance.randint(1, 3)])
    elif what == "cursor":
        grid.cursor = chance.randrange(60)
    elif what == "key":
        await pilot.press(chance.choice(["down", "up", "pagedown", "home", "end"]))
    elif what == "size":
        await pilot.resize_terminal(chance.randrange(8, 70), chance.randrange(6, 30))
    elif what == "focus":
        (grid if chance.random() < 0.5 else pilot.app.screen.query_one("#other", Grid)).focus()
    elif what == "theme":
        pilot.app.theme = chance.choice(THEMES).name
    elif what == "scroll":
        grid.scroll_to(y=chance.randrange(40), animate=False)
    elif what == "lines":
        lines.show([[(f"line {i}", chance_role(i))] for i in range(chance.randrange(6))])
    else:
        pilot.app.screen.query_one(StatusLine).show(
            [Fact(f"fact {chance.randrange(9)}", "accent")], [Fact("right")]
        )
    await pilot.pause()
    return what


def chance_role(number: int) -> str:
    """One of the roles."""
    return ("text", "wrong", "rank1", "quiet")[number % 4]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(6))
async def test_what_is_kept_is_what_would_be_drawn(seed: int) -> None:
    chance, done = random.Random(seed), []
    async with LockstepApp(lambda chosen: Widgets()).run_test(size=(60, 20)) as pilot:
        for _ in range(40):
            done.append(await change(pilot, chance))
            kept = shown(pilot)
            forget(pilot)
            assert kept == shown(pilot), done
    assert len(set(done)) > 5


async def test_a_line_that_stays_the_same_is_not_drawn_again() -> None:
    drawn: list[int] = []

    def row(index: int) -> list[GridCell]:
        drawn.append(index)
        return [(f"row {index}", "text")]

    async with LockstepApp(lambda chosen: Widgets()).run_test(size=(60, 20)) as pilot:
        grid = pilot.app.screen.query_one("#grid", Grid)
        grid.show(8, row)
        grid.focus()
        await pilot.pause()
        assert set(drawn) == set(range(8))
        drawn.clear()
        await pilot.press("down")
        await pilot.pause()
        assert set(drawn) == {0, 1}, "the row that the cursor left and the one that it reached"
        drawn.clear()
        pilot.app.screen.query_one(StatusLine).show([Fact("news")])
        await pilot.pause()
        assert drawn == []
