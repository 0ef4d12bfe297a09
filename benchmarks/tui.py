"""What the screens cost: first paint, key to paint, a session of 10,000 steps, memory.

    python benchmarks/tui.py [--steps 10000] [--json]

First paint is measured in a real pseudo-terminal, from the start of the process to the first drawn frame.
The rest drives the workbench on a synthetic session with the shape of a 0.5B model (24 layers, every tap,
2 ranks). A *stall* is the longest time for which the event loop did not come round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pty
import resource
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from engine.taps.names import tap_specs
from sessions import SessionWriter
from sessions.records import SequenceStep, StepRecord, Tap
from workbench.tui.app import LockstepApp
from workbench.tui.reader import Reader
from workbench.tui.screens.workbench import WorkbenchScreen


def write_session(path: Path, steps: int) -> None:
    """A 0.5B-shaped session: 24 layers × all taps × 2 ranks."""
    specs = tap_specs(num_layers=24, qk_norm=False, kv_replicas=1)
    taps = [Tap(i, spec.name, str(spec.layout)) for i, spec in enumerate(specs)]
    random = np.random.default_rng(0)
    stats = random.normal(1, 0.1, (len(taps), 2, 8)).astype(np.float32)
    stats[:, :, 5:] = 0
    checksums = np.repeat(random.integers(1, 2**60, (len(taps), 1)), 2, axis=1).astype(np.uint64)
    meta = {"token_texts": {str(i): f" token{i}" for i in range(64)}, "config": {"block_size": 16}}
    with SessionWriter.create(path, taps=taps, ranks=2, meta=meta) as writer:
        for step in range(steps):
            sequence = SequenceStep(
                0, [step % 64], [step], [step + 1] * 2, list(range(step // 16 + 1)), (step * 7) % 64,
                False, [(step * 7) % 64, 1], [9.0, 7.5], 9.3, 0.8,
            )  # fmt: skip
            jitter = np.float32(1 + 0.05 * np.sin(step / 7))
            writer.step(
                0, StepRecord(step, "decode", [sequence], 0.02, stats * jitter, checksums + np.uint64(step))
            )


def first_paint(arguments: list[str]) -> float:
    """Seconds from the start of the process to its first frame on a 120 × 40 pseudo-terminal."""
    controller, terminal = pty.openpty()
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "workbench.tui", *arguments],
        stdin=terminal, stdout=terminal, stderr=terminal, close_fds=True,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
    )  # fmt: skip
    os.close(terminal)
    seen = b""
    while (
        b"\xe2" not in seen and time.perf_counter() - began < 20
    ):  # the first character that is drawn, not ASCII
        if select.select([controller], [], [], 0.1)[0]:
            seen += os.read(controller, 65536)
    elapsed = time.perf_counter() - began
    process.terminate()
    process.wait()
    os.close(controller)
    return elapsed


class Watchdog:
    """Notes the longest time between two rounds of the event loop."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last - 0.001), now

    def stop(self) -> float:
        """The longest stall, seconds."""
        self._task.cancel()
        return self.longest


async def drive(path: Path) -> dict[str, float]:
    """Scroll, filter, scrub, jump; the time of each key and the stalls."""
    reader = Reader.open(path)
    app = LockstepApp(lambda: WorkbenchScreen(reader))
    found: dict[str, float] = {}
    async with app.run_test(size=(200, 60)) as pilot:
        await pilot.pause()
        await app.workers.wait_for_complete()
        for name, keys in _SCENES.items():
            watchdog, seconds = Watchdog(), []
            for key in keys:
                began = time.perf_counter()
                app.screen.post_message(_key(key))
                await asyncio.sleep(0)
                app.screen._compositor_refresh()
                seconds.append(time.perf_counter() - began)
                await pilot.pause(0.005)
            await app.workers.wait_for_complete()
            found[f"{name}: longest stall ms"] = round(1000 * watchdog.stop(), 1)
            found[f"{name}: median ms a key"] = round(1000 * statistics.median(seconds), 2)
    return found


def _key(name: str) -> object:
    from textual.events import Key

    return Key(name, name if len(name) == 1 else None)


_SCENES = {
    "scroll operations": ["pagedown"] * 20 + ["down"] * 40,
    "scrub steps": ["["] * 60,
    "panes": [str(i) for i in (2, 3, 5, 6, 7, 8, 1)],
}


async def memory(path: Path, steps: int) -> float:
    """MiB that looking at every hundredth step adds."""
    reader = Reader.open(path)
    app = LockstepApp(lambda: WorkbenchScreen(reader))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await app.workers.wait_for_complete()
        screen = app.screen
        assert isinstance(screen, WorkbenchScreen)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for step in range(0, steps, max(1, steps // 100)):
            await screen.run_line(f"goto {step}")
            await pilot.pause(0.001)
        await app.workers.wait_for_complete()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "long.session"
        write_session(path, options.steps)
        found: dict[str, float] = {"session MiB": round(path.stat().st_size / 2**20, 1)}
        for name, arguments in (("home", []), ("session", [str(path)])):
            found[f"first paint, {name}, s (best of 3)"] = round(
                min(first_paint(arguments) for _ in range(3)), 3
            )
        found |= asyncio.run(drive(path))
        found["memory added by looking at 100 steps, MiB"] = round(
            asyncio.run(memory(path, options.steps)), 1
        )
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        print(f"{name:<48}{value:>10}")


if __name__ == "__main__":
    main()
