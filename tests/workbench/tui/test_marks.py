"""The list of operations while it scrolls, and marks that the mouse puts and takes away."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot

from lockstep.engine.taps.names import layer_of, local_name
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen
from lockstep.workbench.tui.widgets.grid import Grid
from tests.workbench.tui.conftest import Bench, enter, press, settle, text_of


def _list(pilot: Pilot[int]) -> list[str]:
    """The lines of the list of operations, the header first."""
    grid = pilot.app.screen.query_one("#operations", Grid)
    region = grid.region
    return [line[region.x : region.right].rstrip() for line in text_of(pilot)[region.y : region.bottom]]


def _present(pilot: Pilot[int]) -> str:
    screen = pilot.app.screen
    assert isinstance(screen, WorkbenchScreen)
    assert screen.overview is not None
    return screen.overview.taps[screen.where.tap]


@pytest.mark.slow
async def test_the_heading_of_a_layer_stays_on_top_while_its_operations_scroll(bench: Bench) -> None:
    async with bench(size=(80, 24)) as pilot:
        await press(pilot, "home")
        assert _list(pilot)[1].split()[0] == "embed"
        headed = set()
        for key in ["down"] * 50 + ["up"] * 50:
            await pilot.press(key)
            await pilot.pause()
            lines, tap = _list(pilot), _present(pilot)
            layer = layer_of(tap)
            label = tap if layer is None else local_name(tap)
            assert any(label[:12] in line for line in lines[1:]), f"the cursor's row {tap} is in view"
            top = lines[1].split()[0]
            assert top.startswith(("layers.", "embed")), f"{top} has no heading above it"
            below = [line.split()[0] for line in lines[2:] if line]
            if top.startswith("layers.") and layer is not None and f"layers.{layer}" not in below:
                assert top == f"layers.{layer}", "what stands under it is of that layer"
                headed.add(layer)
        assert {0, 1} <= headed
        await press(pilot, "slash", *"q_proj")
        assert not any(line.split()[:1] == ["layers.0"] for line in _list(pilot)), (
            "filtered rows name their layer"
        )


async def test_the_mouse_puts_marks_and_takes_them_away(bench: Bench) -> None:
    async with bench(size=(120, 40)) as pilot:
        await press(pilot, "home")
        before = _present(pilot)
        row = next(i for i, line in enumerate(_list(pilot)) if "attn.q_proj" in line)
        await pilot.click("#operations", offset=(1, row))
        await settle(pilot)
        assert "◆" in _list(pilot)[row].split()[0]
        assert _present(pilot) == before, "the cursor stays"
        await press(pilot, "down", "down", "down")
        assert any("◆" in line and "attn.q_proj" in line for line in _tree(pilot)), "in the tree, too"
        tree = pilot.app.screen.query_one("#tree", Grid)
        marked = next(i for i, line in enumerate(_tree(pilot)) if "attn.q_proj" in line)
        await pilot.click("#tree", offset=(tree.gutter.left + 2, marked))
        await settle(pilot)
        assert not any("◆" in line for line in text_of(pilot)), "a second click, there, takes it away"
        await pilot.click("#tree", offset=(tree.gutter.left + 2, marked))
        await settle(pilot)
        assert "◆" in _list(pilot)[row].split()[0]
        await pilot.click("#operations", offset=(0, row))
        await settle(pilot)
        assert not any("◆" in line for line in text_of(pilot))


async def test_the_heading_of_a_folded_layer_shows_a_breakpoint_before_a_watchpoint(bench: Bench) -> None:
    async with bench(size=(120, 40)) as pilot:
        await press(pilot, "home")
        await enter(pilot, "colon", "watch layers.1.attn.probs absmax > 50")
        (row,) = (i for i, line in enumerate(_tree(pilot)) if "▸ layers.1" in line)
        assert "◇ ▸ layers.1" in _tree(pilot)[row]
        tree = pilot.app.screen.query_one("#tree", Grid)
        await pilot.click("#tree", offset=(tree.gutter.left + 2, row))
        await settle(pilot)
        assert "◆ ▸ layers.1" in _tree(pilot)[row], "a breakpoint at its first operation"


async def test_in_a_replay_a_breakpoint_leaves_the_debugger_where_it_stands(bench: Bench) -> None:
    async with bench(size=(120, 40)) as pilot:
        await press(pilot, "s", "i")
        (stands,) = (line for line in _list(pilot) if "▶" in line)
        operation = stands.split()[1]
        await press(pilot, "down", "down", "b")
        assert [line.split()[1] for line in _list(pilot) if "▶" in line] == [operation]
        await press(pilot, "up", "up", "b")  # back to where it stands
        assert any("▶" in line and f"◆{operation}" in line for line in _tree(pilot)), "both are seen"
        await press(pilot, "b", "down", "down")
        assert [line.split()[1] for line in _list(pilot) if "◆" in line] == [local_name(_present(pilot))]
        assert operation != local_name(_present(pilot))


def _tree(pilot: Pilot[int]) -> list[str]:
    region = pilot.app.screen.query_one("#tree", Grid).region
    return [line[region.x : region.right].rstrip() for line in text_of(pilot)[region.y : region.bottom]]
