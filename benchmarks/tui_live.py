"""What the screens cost while an engine runs flat out behind them: a key, and memory that must not grow with the run.

    python -m benchmarks.tui_live [--keys 300] [--steps 4000] [--json]

Keys: the demo on two ranks, `next` without end (under a rule that keeps it from ending its text). A key counts from
its arrival until its action is done; *painted* is when the screen was next drawn. Memory: a small random model with
room for many steps, while one pane after another is shown; what the second half of the run adds. Ranks, host and
screens share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import random
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from textual.events import Key

from benchmarks.screens import Figure, Stalls, report, resident, until, written_elsewhere
from lockstep.workbench.tui import routes
from lockstep.workbench.tui.app import LockstepApp
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen
from lockstep.workbench.tui.widgets.grid import Grid

#: The largest number of steps that the demo has room for, from a short prompt.
_STEPS = 480
#: A shape that is quick to run, with a long context.
_SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 16384,
}  # fmt: skip


class Hand:
    """Presses keys from a thread of its own, as a terminal does, and notes when each has acted and was painted."""

    def __init__(self, screen: WorkbenchScreen) -> None:
        self.screen = screen
        self.acted: list[float] = []
        self.painted: list[float] = []
        self._acts, self._paints = threading.Event(), threading.Event()
        self._at = 0.0
        screen.watch(screen, "pane", self._happened, init=False)
        screen.watch(screen.query_one("#pane-1 Grid", Grid), "cursor", self._happened, init=False)

    def _happened(self) -> None:
        if not self._acts.is_set():
            self._at = time.perf_counter()
            self._acts.set()
            self.screen.call_after_refresh(self._paints.set)

    def press(self, keys: Iterable[str]) -> None:
        """Press them one after another while the engine runs, at moments that nothing else decides."""
        moments = random.Random(0)
        for key in keys:
            if self.screen.driver.running is None:
                return
            self._acts.clear()
            self._paints.clear()
            began = time.perf_counter()
            self.screen.app.post_message(Key(key, key if len(key) == 1 else None))
            if not (self._acts.wait(10) and self._paints.wait(10)):
                raise TimeoutError(f"{key} did not act")
            self.acted.append(self._at - began)
            self.painted.append(time.perf_counter() - began)
            time.sleep(moments.uniform(0.01, 0.04))


#: The panes, and in the first one the cursor, in turn: each key changes something.
_KEYS = ("2", "1", "down", "down", "pagedown", "5", "1", "up", "pageup", "8", "1", "down", "down", "up")


async def measure(directory: Path, count: int) -> list[Figure]:
    """Keys and memory during a run of the demo."""
    words = ["demo", "--tp", "2", "--ids", "5,6,7,8", "--fault", "mask=additive"]
    app = LockstepApp(routes.running([*words, "--session", str(directory / "live.session")], "the demo"))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(
            lambda: isinstance(app.screen, WorkbenchScreen) and app.screen.present is not None, pilot.pause
        )
        screen = app.screen
        assert isinstance(screen, WorkbenchScreen)
        await pilot.press(*"23456781")  # every pane has been seen once
        hand = Hand(screen)
        stalls, began, first = Stalls(), time.monotonic(), screen.where.step
        screen.commands.run(f"next {_STEPS}")
        await until(lambda: screen.where.step > 20, asyncio.sleep)
        await asyncio.to_thread(hand.press, itertools.islice(itertools.cycle(_KEYS), count))
        rate = (screen.where.step - first) / (time.monotonic() - began)
        stall = stalls.stop()
        await app.workers.wait_for_complete([one for one in app.workers if one.group == "command"])
    acted, painted = sorted(hand.acted), sorted(hand.painted)
    p95, middle = int(0.95 * len(acted)), len(acted) // 2
    return [
        Figure("the engine meanwhile", rate, "tok/s"),
        Figure(f"key to action, 95 of 100 of {len(acted)} keys", 1000 * acted[p95], "ms", 10),
        Figure("key to action, median", 1000 * acted[middle], "ms"),
        Figure("key to painted, median", 1000 * painted[middle], "ms"),
        Figure("key to painted, 95 of 100", 1000 * painted[p95], "ms"),
        Figure("longest stall of the event loop", stall, "ms", 100),
    ]


async def endure(directory: Path, steps: int) -> Figure:
    """Memory over a long run, every pane in turn."""
    model = written_elsewhere(directory, **_SMALL)
    words = [str(model), "--ids", "5,6,7,8", "--session", str(directory / "long.session")]
    app = LockstepApp(routes.running(words, "a small model"))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(
            lambda: isinstance(app.screen, WorkbenchScreen) and app.screen.present is not None, pilot.pause
        )
        screen = app.screen
        assert isinstance(screen, WorkbenchScreen)
        screen.commands.run(f"next {steps}")
        early = at = 0.0
        for pane in itertools.cycle("12345678"):
            await pilot.press(pane)
            await asyncio.sleep(0.5)
            if not early and screen.where.step >= steps // 2:
                gc.collect()
                early, at = resident(), screen.where.step
            if screen.driver.running is None:
                break
        await app.workers.wait_for_complete([one for one in app.workers if one.group == "command"])
        gc.collect()
        grown, last = resident() - early, screen.where.step
    return Figure(f"memory that steps {at} to {last} add", grown, "MiB", 16)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=300)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = asyncio.run(measure(Path(directory), options.keys))
        if options.steps:
            figures.append(asyncio.run(endure(Path(directory), options.steps)))
    report(figures, options.json)


if __name__ == "__main__":
    main()
