"""What recording costs, as a ratio to not recording; what going back costs; how large a session gets.

    python -m benchmarks.recording [MODEL] [--tp 1] [--steps 40] [--rounds 8]

Decode steps of one sequence in blocks, the variants taking turns; of each variant the block whose median is lowest,
because what else a machine does only adds:

    off        no taps, no session: what the model alone takes
    taps       statistics of every tap, attention rows and top-k, thrown away
    recorded   the same, written to a session, a commit a step
    debugger   `next` through the debugger, journal and breakpoints' machinery included

Then the median time of `reverse-next` at step 200 and of opening the session for a replay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lockstep.engine.config import EngineConfig
from lockstep.sessions import Session
from lockstep.workbench.debugger.host.launch import DebugTarget, start
from lockstep.workbench.debugger.host.replay import open_replay
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.inferior.session import create_session
from lockstep.workbench.models.capture import NOTHING, STATS
from lockstep.workbench.models.opening import OpenedModel, open_model

_BACK_AT = 200


def decode(
    model: OpenedModel, config: EngineConfig, directory: Path, steps: int, rounds: int
) -> dict[str, float]:
    """Seconds a decode step, by variant."""
    with Inferior(model.path, model.config, config) as inferior:
        found: dict[str, list[float]] = {"off": [], "taps": [], "recorded": []}
        for round in range(rounds):
            for variant, medians in found.items():
                inferior.watch(NOTHING if variant == "off" else STATS)
                inferior.set_rules({})
                if not inferior.sequences:
                    inferior.add([1, 2, 3, 4])
                inferior.recorder.writer = None
                if variant == "recorded":
                    create_session(inferior, directory / f"{round}.session")
                inferior.step()
                medians.append(statistics.median(_timed(inferior.step) for _ in range(steps)))
                if inferior.recorder.writer is not None:
                    inferior.recorder.writer.close()
    return {variant: min(medians) for variant, medians in found.items()}


def debugged(model: OpenedModel, config: EngineConfig, path: Path, steps: int) -> dict[str, float]:
    """Seconds of `next`, of `reverse-next` at step 200, of opening a replay; bytes a step."""
    with start(DebugTarget(model.path, model.config, config, [[1, 2, 3, 4]], path)) as debugger:
        debugger.execute("next")
        forward = [_timed(lambda: debugger.execute("next")) for _ in range(max(steps, _BACK_AT + 1))]
        back = []
        for _ in range(20):
            debugger.execute(f"goto {_BACK_AT}")
            back.append(_timed(lambda: debugger.execute("reverse-next")))
    with Session.open(path) as session:
        recorded = len(session.steps())
    opening = [_timed(lambda: open_replay(path).close()) for _ in range(5)]
    return {
        "debugger": min(statistics.median(forward[i : i + steps]) for i in range(0, len(forward), steps)),
        "reverse_next": statistics.median(back),
        "open_replay": statistics.median(opening),
        "bytes_a_step": path.stat().st_size / recorded,
    }


def _timed(do: Callable[[], object]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    model = open_model(given.model)
    room = min(max(given.steps, _BACK_AT) + 16, model.config.max_position)
    config = replace(EngineConfig(tp=given.tp, max_sequences=1), max_tokens=room)
    with tempfile.TemporaryDirectory() as scratch:
        times = decode(model, config, Path(scratch), given.steps, given.rounds)
        found = times | debugged(model, config, Path(scratch) / "debugged.session", given.steps)
    if given.json:
        print(json.dumps(found))
        return
    for variant in ("off", "taps", "recorded", "debugger"):
        print(
            f"{variant:<10} {found[variant] * 1e3:8.2f} ms a step   {found[variant] / found['off']:.2f} × off"
        )
    print(f"reverse-next at step {_BACK_AT}: {found['reverse_next'] * 1e3:.2f} ms")
    print(
        f"open a replay: {found['open_replay'] * 1e3:.1f} ms; {found['bytes_a_step'] / 1024:.1f} KiB a step"
    )


if __name__ == "__main__":
    main()
