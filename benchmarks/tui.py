"""What the screens cost: first paint, a session of 10,000 steps (scroll, filter, scrub, panes), its memory.

    python -m benchmarks.tui [--steps 10000] [--repeats 7] [--json]

First paint is measured in a real pseudo-terminal, from the start of the process to the first screenful. The rest
drives the workbench on a synthetic session with the shape of a 0.5B model (24 layers, every tap, 2 ranks). A *stall*
is the longest time for which the event loop did not come round. `benchmarks.tui_live` has the running engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import tempfile
from dataclasses import replace
from pathlib import Path

from textual.pilot import Pilot
from textual.worker import WorkerCancelled

from benchmarks.screens import Figure, Stalls, first_paint, report, resident, write_session
from lockstep.workbench.tui.app import LockstepApp
from lockstep.workbench.tui.drivers.replay import ReplayDriver
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen

#: What is done, key by key; "settled" between two keys is not waited for, as with a key that is held down.
_SCENES = {
    "scroll the operations": ["pagedown"] * 20 + ["down"] * 60 + ["pageup"] * 20,
    "filter the operations": ["slash", *"layers.2", *["backspace"] * 8, *"q_proj", "enter", "slash"]
    + ["backspace"] * 6 + ["enter"],
    "scrub the steps": ["left_square_bracket"] * 100,
    "the panes": [str(number) for number in (2, 3, 4, 5, 6, 7, 8, 1)],
}  # fmt: skip
#: As the design has it: the event loop never stalls over 100 ms.
_STALL = 100.0


async def drive(path: Path) -> list[Figure]:
    """The stalls of every scene, at 200 × 60."""
    reader, found = Reader.open(path), []
    app = LockstepApp(lambda chosen: WorkbenchScreen(reader, ReplayDriver(path)))
    async with app.run_test(size=(200, 60)) as pilot:
        await _settled(pilot)
        for name, keys in _SCENES.items():
            stalls = Stalls()
            for key in keys:
                await pilot.press(key)
            await _settled(pilot)
            found.append(Figure(f"{name}: longest stall", stalls.stop(), "ms", _STALL))
    return found


async def memory(path: Path, steps: int) -> list[Figure]:
    """What looking at every tenth step leaves in memory, once a first look has warmed everything up."""
    reader = Reader.open(path)
    app = LockstepApp(lambda chosen: WorkbenchScreen(reader, ReplayDriver(path)))
    async with app.run_test(size=(120, 40)) as pilot:
        await _settled(pilot)
        before = 0.0
        for round_ in range(2):
            for step in range(round_, steps, 20):
                await _look(pilot, step)
            gc.collect()
            before, now = (resident(), 0.0) if not round_ else (before, resident())
    looks = len(range(1, steps, 20))
    return [Figure(f"memory that {looks} further steps looked at add", now - before, "MiB", 16.0)]


async def _look(pilot: Pilot[int], step: int) -> None:
    screen = pilot.app.screen
    assert isinstance(screen, WorkbenchScreen)
    screen.where = replace(screen.where, step=step)  # as the scrubbing keys do
    await _settled(pilot)


async def _settled(pilot: Pilot[int]) -> None:
    await pilot.pause()
    while any(worker.is_running for worker in pilot.app.workers):
        with contextlib.suppress(WorkerCancelled):  # a newer one has taken its place
            await pilot.app.workers.wait_for_complete()
        await pilot.pause()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "long.session"
        write_session(path, options.steps)
        figures = [
            Figure(f"size of the session of {options.steps} steps", path.stat().st_size / 2**20, "MiB")
        ]
        for name, arguments, shows in (
            ("lockstep: first paint", [], b"^q"),
            ("lockstep tui SESSION: first paint", ["tui", str(path)], b"opening"),
        ):
            figures.append(Figure(name, first_paint(arguments, shows, options.repeats), "s", 0.4))
        shown = first_paint(["tui", str(path)], b"^q", options.repeats)
        figures.append(Figure("lockstep tui SESSION: everything shown", shown, "s"))
        figures += asyncio.run(drive(path))
        figures += asyncio.run(memory(path, options.steps))
    report(figures, options.json)


if __name__ == "__main__":
    main()
