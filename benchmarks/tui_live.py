"""What the screens cost while an engine runs flat out behind them: a key, and memory that must not grow with the run.

    python -m benchmarks.tui_live [--keys 300] [--json]

The demo on two ranks, `next` without end (under a rule that keeps it from ending its text). A key counts from its
arrival until its action is done; *painted* is when the screen was next drawn. Ranks, host and screens share this
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from textual.events import Key
from textual.pilot import Pilot
from textual.widget import Widget

from benchmarks.screens import Figure, Stalls, report, resident, until
from workbench.tui.app import LockstepApp
from workbench.tui.opening import starting
from workbench.tui.screens.live import LiveWorkbench
from workbench.tui.widgets.grid import Grid

#: The largest number of steps that the demo has room for, from a short prompt.
_STEPS = 480


async def measure(directory: Path, count: int) -> list[Figure]:
    """Keys and memory during runs of the demo."""
    words = ["demo", "--tp", "2", "--ids", "5,6,7,8", "--rule", "mask=additive"]
    app = LockstepApp(lambda: starting([*words, "--session", str(directory / "live.session")], "the demo"))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(
            lambda: isinstance(app.screen, LiveWorkbench) and app.screen.present is not None, pilot.pause
        )
        screen = app.screen
        assert isinstance(screen, LiveWorkbench)
        acted: list[float] = []
        painted: list[float] = []
        stalls, began, first = Stalls(), time.monotonic(), screen.where.step
        screen.run_command(f"next {_STEPS}")
        await until(lambda: screen.where.step > 20, pilot.pause)
        gc.collect()
        early, at = resident(), screen.where.step
        for key, done in itertools.islice(_keys(screen), count):
            if screen.engine.running is None:
                break
            await _press(pilot, key, done, acted, painted)
        rate = (screen.where.step - first) / (time.monotonic() - began)
        stall = stalls.stop()
        await until(lambda: screen.engine.running is None, pilot.pause)
        gc.collect()
        grown, last = resident() - early, screen.where.step
    p95 = int(0.95 * len(acted))
    return [
        Figure("the engine meanwhile", rate, "tok/s"),
        Figure(f"key to action, 95 of 100 of {len(acted)} keys", 1000 * sorted(acted)[p95], "ms", 10),
        Figure("key to action, median", 1000 * sorted(acted)[len(acted) // 2], "ms"),
        Figure("key to painted, 95 of 100", 1000 * sorted(painted)[p95], "ms"),
        Figure("longest stall of the event loop", stall, "ms", 100),
        Figure(f"memory that steps {at} to {last} add", grown, "MiB", 16),
    ]


def _keys(screen: LiveWorkbench) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Keys, each with what tells that it has acted: the panes, and in the first one the cursor, in turn."""
    for pane in itertools.cycle((2, 1, 5, 1, 8, 1)):
        yield str(pane), partial(_shows, screen, pane)
        if pane == 1:
            grid = screen.query_one("#pane-1 Grid", Grid)
            for key in ("down", "down", "pagedown", "up", "pageup"):
                yield key, partial(_moved, grid, grid.cursor)


def _shows(screen: LiveWorkbench, pane: int) -> bool:
    return screen.pane == pane and isinstance(screen.focused, Widget)


def _moved(grid: Grid, before: int) -> bool:
    return grid.cursor != before


async def _press(
    pilot: Pilot[int], key: str, done: Callable[[], bool], acted: list[float], painted: list[float]
) -> None:
    drawn = asyncio.Event()
    began = time.perf_counter()
    pilot.app.post_message(Key(key, key if len(key) == 1 else None))
    while not done():
        if time.perf_counter() - began > 20:
            raise TimeoutError(f"{key} did not act")
        await asyncio.sleep(0)
    acted.append(time.perf_counter() - began)
    pilot.app.screen.call_after_refresh(drawn.set)
    await drawn.wait()
    painted.append(time.perf_counter() - began)
    await asyncio.sleep(0.02)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report(asyncio.run(measure(Path(directory), options.keys)), options.json)


if __name__ == "__main__":
    main()
