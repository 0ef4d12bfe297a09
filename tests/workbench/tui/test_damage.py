"""A damaged recording on the screens: reported when they open, and at the step that it concerns."""

from __future__ import annotations

from pathlib import Path

from tests.sessions.samples import tamper
from tests.workbench.tui.conftest import Bench, press, text_of
from tests.workbench.tui.synthetic import build


async def test_damage_is_reported_where_it_is_and_the_rest_is_shown(bench: Bench, tmp_path: Path) -> None:
    path = build(tmp_path / "a.session", nan_from=None)
    tamper(
        path,
        "UPDATE events SET text = 'another' WHERE id = 1",
        "UPDATE sequences SET emitted = 7 WHERE branch = 0 AND step = 10",
        sealed=False,
    )
    async with bench(size=(160, 40), path=path) as pilot:
        shown = text_of(pilot)
        assert "damaged" in shown[0]
        assert [line for line in shown if "event 1: its checksum does not match" in line]
        await press(pilot, "[")
        shown = text_of(pilot)
        assert "step 10/11" in shown[0]
        assert [line for line in shown if "damaged: step 10 of branch 0, sequence 0: its checksum" in line]
        await press(pilot, "[")
        shown = text_of(pilot)
        assert "step 9/11" in shown[0]
        assert not [line for line in shown if "does not match" in line]
        assert [line for line in shown if "│✗│" in line], "the token of step 10"
