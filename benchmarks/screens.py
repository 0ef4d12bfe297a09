"""What the benchmarks of the screens share: a terminal to start them in, a session, the loop's stalls, the report."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from lockstep.engine.taps.names import tap_specs
from lockstep.sessions import SessionWriter
from lockstep.sessions.meta import ConfigMeta, SessionMeta
from lockstep.sessions.records import SequenceStep, StepRecord, Tap

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Figure:
    """A measurement: what, how much, in what, and what it is to be (the figure may not exceed it)."""

    what: str
    value: float
    unit: str
    target: float | None = None


def report(figures: Sequence[Figure], as_json: bool) -> None:
    """Print the figures beside their targets, with how busy the machine was."""
    load = os.getloadavg()[0]
    if as_json:
        print(
            json.dumps(
                {"load": load, "cores": os.cpu_count(), "figures": [asdict(f) for f in figures]}, indent=1
            )
        )
        return
    for figure in figures:
        target = "" if figure.target is None else f"≤ {figure.target:g} {figure.unit}"
        mark = "" if figure.target is None else ("✓" if figure.value <= figure.target else "✗")
        print(f"{figure.what:<64}{figure.value:>9.4g} {figure.unit:<4}{target:>12} {mark}")
    print(f"load {load:.1f} on {os.cpu_count()} cores")


def first_paint(arguments: Sequence[str], shows: bytes, repeats: int) -> float:
    """The least of `repeats` times, in seconds, from the start of `lockstep ARGUMENTS` to `shows` on a
    120 × 40 pseudo-terminal. The first run, which writes the byte code as an installation does, does not count."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "TERM": "xterm-256color",
            "PYTHONPATH": str(ROOT),
            "PYTHONPYCACHEPREFIX": cache,
        }
        for name in ("PYTHONDONTWRITEBYTECODE", "COLUMNS", "LINES"):
            environment.pop(name, None)
        times = [_paint(arguments, shows, environment) for _ in range(repeats + 1)]
    return min(times[1:])


def _paint(arguments: Sequence[str], shows: bytes, environment: dict[str, str]) -> float:
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "lockstep.workbench.cli", *arguments],
        stdin=terminal, stdout=terminal, stderr=terminal, env=environment,
    )  # fmt: skip
    os.close(terminal)
    seen = b""
    while shows not in seen and time.perf_counter() - began < 20:
        if select.select([controller], [], [], 0.1)[0]:
            seen += os.read(controller, 65536)
    elapsed = time.perf_counter() - began
    process.terminate()
    with contextlib.suppress(OSError):  # the terminal's other side is closed: it has ended
        while process.poll() is None:  # it takes leave on the screen
            if select.select([controller], [], [], 0.1)[0]:
                os.read(controller, 65536)
    process.wait()
    os.close(controller)
    return elapsed


def write_session(path: Path, steps: int) -> None:
    """A session with the shape of a 0.5B model's: 24 layers × every tap × 2 ranks."""
    specs = tap_specs(24)
    taps = [Tap(i, spec.name, str(spec.layout)) for i, spec in enumerate(specs)]
    random = np.random.default_rng(0)
    stats = random.normal(1, 0.1, (len(taps), 2, 8)).astype(np.float32)
    stats[:, :, 5:] = 0
    checksums = np.repeat(random.integers(1, 2**60, (len(taps), 1)), 2, axis=1).astype(np.uint64)
    meta = SessionMeta(token_texts={i: f" token{i}" for i in range(64)}, config=ConfigMeta(block_size=16))
    with SessionWriter.create(path, taps=taps, ranks=2, meta=meta) as writer:
        for step in range(steps):
            sequence = SequenceStep(
                0, [step % 64], [step], [[step + 1] * 24] * 2, list(range(step // 16 + 1)), (step * 7) % 64,
                False, [(step * 7) % 64, 1], [9.0, 7.5], 9.3, 0.8,
            )  # fmt: skip
            jitter = np.float32(1 + 0.05 * np.sin(step / 7))
            writer.step(
                0, StepRecord(step, "decode", [sequence], 0.02, stats * jitter, checksums + np.uint64(step))
            )


def written_elsewhere(directory: Path, **changes: int) -> Path:
    """`benchmarks.model`'s checkpoint with these changes, written by another process: this one has no torch."""
    made = (
        "import json, pathlib, sys; from benchmarks.model import half_billion;"
        "print(half_billion(pathlib.Path(sys.argv[1]), **json.loads(sys.argv[2])))"
    )
    reported = subprocess.run(
        [sys.executable, "-c", made, str(directory), json.dumps(changes)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return Path(reported.stdout.splitlines()[-1])


#: Seconds between two looks at the event loop. Each costs some 0.1 ms: were they closer, the process would never be
#: idle by Textual's measure (5 % of a core), and its pilot would wait a second at every key.
_PROBE = 0.005


class Stalls:
    """Notes the longest time for which the event loop did not come round."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(_PROBE)
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last - _PROBE), now

    def stop(self) -> float:
        """The longest stall, milliseconds."""
        self._task.cancel()
        return 1000 * self.longest


async def until(
    met: Callable[[], object], pause: Callable[[float], Awaitable[None]], seconds: float = 120
) -> None:
    """Wait until `met`; TimeoutError when it takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not met():
        if time.monotonic() > deadline:
            raise TimeoutError("what was waited for did not come")
        await pause(0.02)


def resident() -> float:
    """The memory that this process holds now, MiB."""
    return float(psutil.Process().memory_info().rss) / 2**20
