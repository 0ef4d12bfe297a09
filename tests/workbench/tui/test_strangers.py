"""Every pane on sessions of strangers: each value is refused or shown as broken where it stands; nothing escapes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from textual.pilot import Pilot

from lockstep.sessions import SessionError
from lockstep.workbench.tui.panes.base import Pane
from tests.sessions.oddities import ODDITIES, some_of_each
from tests.sessions.strangers import usual, write
from tests.workbench.tui.conftest import Bench, press, settle

#: Through every pane with its modes, the tensor screens, branches, ranks, layers and stops.
KEYS = (
    "1", "down", "enter", "v", "v", "escape", "2", "m", "m", "v", "d", "3", "enter", "down", "escape", "4", "m",
    "enter", "escape", "5", "enter", "m", "6", "enter", "7", "enter", "down", "right", "escape", "8", "down",
    "enter", "w", "T", "R", "full_stop", "right_curly_bracket", "left_square_bracket", "x", "escape", "n", "s",
    "i", "b", "z", "y",
)  # fmt: skip
SIZES = ((80, 24), (160, 50))
#: What acts on a terminal or on the order of the text around it.
OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
#: `make soak` has all of them read, exported and replayed.
WALKED = some_of_each(8)
#: Several at once: what has failed before.
QUICK = (("foreign_names", "one_infinity"), ("nothing_in_sequences", "layouts_do_not_fit"))


async def walk(pilot: Pilot[int]) -> None:
    """Press every key; nothing that a terminal obeys is ever drawn."""
    for key in KEYS:
        await pilot.press(key)
        await settle(pilot, rounds=1)
        for strip in pilot.app.screen._compositor.render_strips():
            assert not OBEYED.search(strip.text), (key, strip.text)


async def shown(bench: Bench, path: Path, oddities: Sequence[str], size: tuple[int, int]) -> None:
    """With LOCKSTEP_DEBUG, which is set in the tests of the screens, whatever escapes ends the test."""
    made = usual()
    for oddity in oddities:
        ODDITIES[oddity](made)
    write(path, made)
    with suppress(SessionError):  # refused
        async with bench(path=path, size=size) as pilot:
            await walk(pilot)


@pytest.mark.parametrize("oddities", QUICK, ids=" ".join)
@pytest.mark.slow
async def test_the_panes_stand_it(bench: Bench, tmp_path: Path, oddities: Sequence[str]) -> None:
    """On a small terminal or a large one, by turns."""
    size = SIZES[QUICK.index(tuple(oddities)) % 2]
    await shown(bench, tmp_path / "stranger.session", oddities, size)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "oddity"), enumerate(WALKED), ids=WALKED)
async def test_the_panes_stand_all_of_it(bench: Bench, tmp_path: Path, number: int, oddity: str) -> None:
    """On a small terminal or a large one, by turns: values of one kind are shown on both."""
    await shown(bench, tmp_path / "stranger.session", (oddity,), SIZES[number % 2])


@pytest.mark.slow
async def test_a_taps_name_makes_no_path(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name that an export proposes is one in the working directory, whatever the tap is called."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    names = iter((f"{tmp_path}/outside/x", "../../x", "CON", "...", "x" * 300, "\x1b[2J"))
    made = usual()
    made.rename(lambda index, name: next(names, name))
    async with bench(path=write(tmp_path / "stranger.session", made)) as pilot:
        for index in range(6):
            pilot.app.screen.post_message(Pane.OpenTensor(index))
            await settle(pilot)
            await press(pilot, "e", "s", "enter", "escape")
    written = sorted(path.name for path in (tmp_path / "cwd").iterdir())
    assert len(written) == 6
    assert all("-step2" in name and name.endswith(".svg") for name in written)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cwd", "stranger.session"]
