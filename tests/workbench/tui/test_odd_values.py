"""Every pane on what breaks figures: a step full of NaN, of Inf, a text of one token, a branch without steps.

`pytest tests/workbench/tui/test_odd_values.py --snapshot-update` takes the texts anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from lockstep.workbench.tui.screens.workbench import WorkbenchScreen
from lockstep.workbench.views.where import Where
from tests.workbench.tui.conftest import Bench, enter, press, settle, text_of
from tests.workbench.tui.odd import ODD, build_odd


@pytest.mark.slow
@pytest.mark.parametrize("kind", ODD)
async def test_every_pane(kind: str, tmp_path: Path, bench: Bench, snapshot: SnapshotAssertion) -> None:
    path = build_odd(tmp_path / "odd.session", kind)
    seen = {}
    async with bench(size=(120, 40), path=path) as pilot:
        if kind == "empty branch":
            screen = pilot.app.screen
            assert isinstance(screen, WorkbenchScreen)
            screen.look(Where(branch=1))
            await settle(pilot)
        for pane in "123456789":
            await press(pilot, pane)
            if pane == "9":
                await enter(pilot, "colon", "print layers.0.attn.k_cache")
            elif pane == "5":
                await press(pilot, "enter")  # a candidate over the steps
            seen[pane] = "\n".join(text_of(pilot))
    assert seen == snapshot
