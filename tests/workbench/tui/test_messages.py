"""Nothing that the screens report is lost: it is whole, or ends in … and opens; and it stands in the Journal."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.pilot import Pilot
from textual.widgets import Static

import lockstep.workbench.tui
from lockstep.engine.faults.catalogue import FAULTS
from lockstep.workbench.debugger.core.registry import commands
from lockstep.workbench.tui.panes.titles import TITLES, digit
from lockstep.workbench.tui.screens.output import OutputScreen
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen
from lockstep.workbench.tui.widgets.grid import Grid
from lockstep.workbench.tui.widgets.message_line import MessageLine
from lockstep.workbench.tui.widgets.status_line import Fact, StatusLine
from lockstep.workbench.tui.widgets.text_block import TextBlock, cut, folded
from tests.workbench.tui.conftest import Bench, press, settle, text_of
from tests.workbench.tui.odd import build_odd

WORDS = st.text(st.sampled_from("abc de雨f.:/"), min_size=0, max_size=200)


def _words(text: str) -> str:
    """Without the space in which lines were broken."""
    return re.sub(r"\s+", "", text)


@given(st.lists(WORDS, min_size=1, max_size=4), st.integers(10, 90))
def test_folding_loses_nothing_and_fits(pieces: list[str], width: int) -> None:
    line = [(text, str(i)) for i, text in enumerate(pieces)]
    rows = folded(line, width)
    assert all(sum(cell_len(text) for text, _ in row) <= width for row in rows)
    assert _words("".join(text for row in rows for text, _ in row)) == _words("".join(pieces))
    for role in range(len(pieces)):
        kept = "".join(text for row in rows for text, of in row if of == str(role))
        assert _words(kept) == _words(pieces[role]), "every word keeps its colour"


@given(st.lists(WORDS, min_size=1, max_size=4), st.integers(2, 90))
def test_a_line_that_is_cut_reports_it(pieces: list[str], width: int) -> None:
    line = [(text, "text") for text in pieces]
    shown = "".join(text for text, _ in cut(line, width))
    assert cell_len(shown) <= width
    assert shown == "".join(pieces) or shown.endswith("…")


@given(
    st.lists(st.tuples(st.text("abcdef ", max_size=60), st.integers(0, 2)), max_size=6), st.integers(30, 120)
)
def test_a_fact_of_the_status_line_is_whole_or_shows_that_it_is_not(
    texts: list[tuple[str, int]], width: int
) -> None:
    facts = [Fact(f"{i}{text.strip()}.", drop=drop) for i, (text, drop) in enumerate(texts)]
    left, right = StatusLine.placed(facts[:3], facts[3:], width)
    shown = {fact.text[0]: fact.text for fact in (*left, *right)}
    for fact in facts:
        kept = shown.get(fact.text[0])
        assert (kept is None and fact.drop) or kept == fact.text or (kept and kept.endswith("…"))


def _screen(pilot: Pilot[int]) -> WorkbenchScreen:
    screen = pilot.app.screen
    assert isinstance(screen, WorkbenchScreen)
    return screen


async def _is_reported(pilot: Pilot[int], text: str) -> None:
    """The message is on screen, whole; or it ends in … and enter opens the rest."""
    message = pilot.app.screen.query_one(MessageLine)
    rows = text_of(pilot)[message.region.y : message.region.bottom]
    shown = _words("".join(rows))
    if _words(text) in shown:
        return
    assert rows[-1].endswith("… enter: all of it"), rows
    await press(pilot, "enter")
    assert isinstance(pilot.app.screen, OutputScreen)
    sheet = pilot.app.screen.query_one("#sheet")
    opened = _words(pilot.app.screen.query_one(Static).content)
    assert _words(text) in opened
    assert sheet.max_scroll_x == 0, "what is longer goes on below, not beside"
    await press(pilot, "escape")


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (40, 12)])
@pytest.mark.sampled(3)
async def test_a_message_of_any_length_wraps_opens_and_is_kept(bench: Bench, size: tuple[int, int]) -> None:
    async with bench(size=size) as pilot:
        for length in (10, 79, 80, 200, 2000):
            text = " ".join(f"word{i}" for i in range(length))[:length].strip() + f" end{length}"
            _screen(pilot).report(text, wrong=length % 2 == 0)
            await settle(pilot)
            await _is_reported(pilot, text)
        assert text_of(pilot)[-1].rstrip().endswith("^q quit"), "the keys stay in sight"
        await press(pilot, "8")
        entries = _screen(pilot).front.entries
        assert [entry.text for entry in entries][-1].endswith(" end2000")
        _screen(pilot).query_one("#events", Grid).focus()
        await press(pilot, "end")
        entry = _screen(pilot).query_one("#entry", TextBlock)
        assert _words(entry.text) == _words(entries[-1].text), "in full under the list"


async def test_enter_is_the_panes_own_where_no_message_is_cut(bench: Bench) -> None:
    async with bench(size=(80, 24)) as pilot:
        _screen(pilot).report("word " * 400)
        await settle(pilot)
        await press(pilot, "enter")
        assert isinstance(pilot.app.screen, OutputScreen)
        await press(pilot, "escape", "enter")
        assert _screen(pilot).front.TITLE.startswith("Tensor"), "the tensor, as ever"


@pytest.mark.slow
async def test_what_every_command_answers_to_nonsense_is_reported_in_full(bench: Bench) -> None:
    """Each command of the registry, with a long argument that it cannot want."""
    async with bench(size=(80, 24)) as pilot:
        screen = _screen(pilot)
        reported: list[str] = []
        report = screen.report

        def heard(text: str, wrong: bool = False, keep: bool = True, finding: bool = False) -> None:
            reported.append(text)
            report(text, wrong, keep, finding)

        screen.report = screen.runner.report = heard  # type: ignore[method-assign]
        for name in commands():
            if name in ("quit", "interrupt"):
                continue
            reported.clear()
            screen.commands.run(f"{name} nonsense-{'x' * 300}")
            await settle(pilot)
            if pilot.app.screen is not screen:
                await press(pilot, "escape")
            elif reported:
                await _is_reported(pilot, reported[-1])


@pytest.mark.slow
async def test_every_pane_fits_or_shows_the_cut_at_80_columns(bench: Bench, tmp_path: Path) -> None:
    """Whatever is drawn as text: no line of a block, no empty pane, no dialog loses its end unsaid."""
    async with bench(size=(80, 24), path=build_odd(tmp_path / "odd.session", "nan")) as pilot:
        for number, _title in enumerate(TITLES, 1):
            await press(pilot, digit(number))
            _is_whole(pilot)
        await press(pilot, "x")
        grid = pilot.app.screen.query_one(Grid)
        for _row in range(grid.count):
            await press(pilot, "down")
            _is_whole(pilot)
        shown = "\n".join(text_of(pilot))
        assert FAULTS
        assert "cannot act: " in shown


def _is_whole(pilot: Pilot[int]) -> None:
    width = pilot.app.size.width
    for block in pilot.app.screen.query(TextBlock):
        if not block.display or not block.region.width:
            continue
        room = block.scrollable_content_region.width
        for y, line in enumerate(block.text.splitlines()):
            drawn = block.render_line(y).text.rstrip() if not block.scroll_offset.y else ""
            assert cell_len(line.rstrip()) <= room or drawn.endswith("…") or not drawn, (block.id, line)
    for static in pilot.app.screen.query(Static):
        if static.display and static.region.width:
            assert static.region.width <= width
            assert static.virtual_size.height <= static.region.height, "an empty pane's text has room"


def test_no_message_goes_another_way() -> None:
    """What is reported goes by `report`, `notify`, `empty` or a sheet, and none of them gets a text that was cut."""
    root = Path(lockstep.workbench.tui.__file__).parent
    ways = {"report", "_report", "_report_text", "notify", "empty", "_notify"}
    for file in sorted(root.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if (
                not isinstance(node, ast.Call)
                or not isinstance(node.func, ast.Attribute)
                or node.func.attr not in ways
            ):
                continue
            for part in ast.walk(node):
                limits = [
                    word.value.value
                    for word in getattr(part, "keywords", ())
                    if word.arg == "limit" and isinstance(word.value, ast.Constant)
                ]
                assert all(limit >= 2000 for limit in limits), f"{file.name}:{node.lineno}"
