"""Pictures of the screens, held against those that were looked at and found good.

`pytest tests/workbench/tui/test_snapshots.py --snapshot-update` takes them anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from lockstep.workbench.tui.app import LockstepApp
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.tui.settings import UserSettings
from tests.workbench.mixture import build_mixture
from tests.workbench.tui.conftest import press, replaying, settle

SMALL, USUAL, LARGE = (80, 24), (120, 40), (200, 60)
DARK, LIGHT = "lockstep-dark", "lockstep-light"

#: What is looked at, where, in which theme, after which keys. The session's stop is at step 6.
SHOTS = {
    "operations-small": (SMALL, DARK, "{"),
    "operations": (USUAL, DARK, "{"),
    "operations-large": (LARGE, DARK, "{ s i i"),
    "operations-light": (USUAL, LIGHT, "{"),
    "operations-large-light": (LARGE, LIGHT, "{"),
    "attention": (USUAL, DARK, "2"),
    "attention-head-small": (SMALL, DARK, "2 m"),
    "attention-light": (USUAL, LIGHT, "2"),
    "cache": (USUAL, DARK, "3"),
    "weights": (SMALL, DARK, "4"),
    "logits": (USUAL, DARK, "5"),
    "sentinels": (USUAL, DARK, "6"),
    "golden": (LARGE, DARK, "{ 7"),
    "golden-small": (SMALL, LIGHT, "{ 7"),
    "journal": (USUAL, DARK, "8"),
    "branches": (USUAL, DARK, "8 down enter"),
    "help": (USUAL, DARK, "question_mark"),
    "split": (USUAL, DARK, "vertical_line o"),
    "split-small": (SMALL, DARK, "vertical_line o 3"),
    "split-light": (USUAL, LIGHT, "vertical_line o 2"),
    "split-large": (LARGE, DARK, "vertical_line o 2 down"),
}

#: The same of a mixture of experts.
EXPERT_SHOTS = {"experts": (USUAL, DARK, "0"), "experts-tokens-small": (SMALL, DARK, "0 m")}


@pytest.fixture
def readers() -> Iterator[list[Reader]]:
    """Readers that are closed at the end."""
    opened: list[Reader] = []
    yield opened
    for reader in opened:
        reader.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(SHOTS))
def test_screen_looks_as_it_did(name: str, session: Path, readers: list[Reader], snap_compare: Any) -> None:
    size, theme, keys = SHOTS[name]
    readers.append(Reader.open(session))

    async def look(pilot: Pilot[int]) -> None:
        await settle(pilot)
        await press(pilot, *keys.split())

    app = LockstepApp(replaying(readers[-1]), UserSettings(theme=theme))
    assert snap_compare(app, terminal_size=size, run_before=look)


@pytest.mark.parametrize("name", list(EXPERT_SHOTS))
def test_the_experts_look_as_they_did(
    name: str, tmp_path: Path, readers: list[Reader], snap_compare: Any
) -> None:
    size, theme, keys = EXPERT_SHOTS[name]
    readers.append(Reader.open(build_mixture(tmp_path / "mixture.session")))

    async def look(pilot: Pilot[int]) -> None:
        await settle(pilot)
        await press(pilot, *keys.split())

    app = LockstepApp(replaying(readers[-1]), UserSettings(theme=theme))
    assert snap_compare(app, terminal_size=size, run_before=look)
