"""The list of toggles: groups once, found by what is typed, and what is reported of a fault in full."""

from __future__ import annotations

import re

import pytest

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.catalogue import FAULTS
from lockstep.sessions import Session
from lockstep.workbench.demo import MODEL_DIR
from lockstep.workbench.paths import find_session
from lockstep.workbench.tui.screens.toggles import TogglesScreen, filtered_rows, toggle_rows
from lockstep.workbench.tui.widgets.grid import Grid
from lockstep.workbench.views.model_config import model_config
from lockstep.workbench.views.source import SessionSource
from tests.workbench.tui.conftest import Bench, press, text_of


def _model() -> ModelConfig:
    """That of a recording, as the screen asks for it."""
    with Session.open(find_session("gallery/mask-additive")) as session:
        return model_config(SessionSource(session))


def test_what_can_act_on_the_model_is_not_greyed() -> None:
    config, source = open_checkpoint(MODEL_DIR)
    source.close()
    shown = {row.fault.id: row.why_not for row in toggle_rows(_model(), 2, {}) if row.fault is not None}
    assert shown == {fault.id: fault.needs(config, 2) or "" for fault in FAULTS}


def test_each_group_has_one_heading_and_no_fault_is_missing() -> None:
    rows = toggle_rows(_model(), 2, {})
    headings = [row.heading for row in rows if row.fault is None]
    assert len(headings) == len(set(headings)) == len({fault.group for fault in FAULTS})
    assert {row.fault.id for row in rows if row.fault is not None} == {fault.id for fault in FAULTS}


@pytest.mark.parametrize("words", ["bias", "BIAS load", "rope", "gibberish no fault has"])
def test_a_filter_keeps_what_has_every_word_under_its_group(words: str) -> None:
    rows = filtered_rows(toggle_rows(_model(), 2, {}), words)
    for row, after in zip(rows, [*rows[1:], None], strict=False):
        if row.fault is None:
            assert after is not None
            assert after.fault is not None, "a heading stands over something"
            assert after.fault.group == row.heading
    reported = [
        f"{row.fault.title} {row.fault.symptom} {row.fault.seam}" for row in rows if row.fault is not None
    ]
    assert bool(reported) == (words != "gibberish no fault has")
    titles = [fault for fault in FAULTS if all(word in fault.title.lower() for word in words.lower().split())]
    assert len(reported) >= len(titles)


@pytest.mark.slow
async def test_the_cursor_passes_over_headings(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "x")
        screen = pilot.app.screen
        assert isinstance(screen, TogglesScreen)
        grid, count = screen.query_one(Grid), len(FAULTS)
        stood = [grid.cursor]
        for key in ["down"] * count + ["up"] * count:
            await pilot.press(key)
            stood.append(grid.cursor)
        assert all(screen._rows[row].fault is not None for row in stood)
        assert len(set(stood)) == count, "each fault is reached"
        await pilot.press("home")
        assert grid.cursor == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_slash_filters_and_escape_shows_all_again(bench: Bench, size: tuple[int, int]) -> None:
    async with bench(size) as pilot:
        await press(pilot, "x", "slash", *"biases")
        screen = pilot.app.screen
        assert isinstance(screen, TogglesScreen)
        grid = screen.query_one(Grid)
        shown = "\n".join(text_of(pilot))
        assert re.search(r"known bug +fault", shown)
        assert "q/k/v biases never loaded" in shown
        assert grid.count < len(FAULTS)
        assert grid.cursor == 1, "on the first fault, below its heading"
        await press(pilot, "enter")
        assert grid.has_focus
        # All that is reported of the fault is there, whatever the width.
        fault = next(fault for fault in FAULTS if fault.title == screen._rows[grid.cursor].fault.title)  # type: ignore[union-attr]
        flat = re.sub(r"\s+", " ", "\n".join(line.split("│")[-2:][0].strip() for line in text_of(pilot)))
        assert fault.symptom in flat
        why = screen._rows[grid.cursor].why_not
        assert (
            f"cannot act: {why or 'this is a replay: nothing runs here (lockstep tui MODEL runs one)'}"
            in flat
        )
        await press(pilot, "escape")
        assert grid.count > len(FAULTS)
        await press(pilot, "slash", *"zzz")
        assert "No fault has these words" in "\n".join(text_of(pilot))
        await press(pilot, "enter", "space", "escape", "escape")
        assert not isinstance(pilot.app.screen, TogglesScreen)
