"""The Experts pane: what a key shows, at every size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.workbench.tui.panes.experts import ExpertsPane
from tests.workbench.mixture import IDS, build_mixture
from tests.workbench.tui.conftest import Bench, press, text_of


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_experts_and_tokens_can_be_read(bench: Bench, tmp_path: Path, size: tuple[int, int]) -> None:
    async with bench(size=size, path=build_mixture(tmp_path / "mixture.session")) as pilot:
        await press(pilot, "0")
        text = "\n".join(text_of(pilot))
        assert "layer 0 8 experts" in text
        assert re.search(r" 3 +0 +4 +36\.4% .*NaN", text), "expert 3, on rank 0, with four tokens"
        assert re.search(r" 4 +1 +0 +0\.0%.* no tokens", text)
        assert "3 tokens with a wrong choice" in text
        await press(pilot, "m", "up")
        text = "\n".join(text_of(pilot))
        assert "id 8 is no expert's (0–7)" in text, "of the token under the cursor"
        pane = pilot.app.screen.front
        assert isinstance(pane, ExpertsPane)
        table = pane.table()
        assert table is not None
        assert [row[2] for row in table.rows] == [f"{a} {b}" for a, b in IDS]


async def test_a_dense_layer_reports_it(bench: Bench, tmp_path: Path) -> None:
    async with bench(path=build_mixture(tmp_path / "mixture.session")) as pilot:
        await press(pilot, "0")
        pilot.app.screen.look(pilot.app.screen.where.__class__(tap=4))
        await press(pilot, "R")
        assert any("Layer 1 is dense" in line for line in text_of(pilot))


async def test_a_dense_model_reports_it(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "0")
        assert any("The model is dense: no layer has experts." in line for line in text_of(pilot))
