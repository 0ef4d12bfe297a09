"""Reads hostile sessions one after the other and prints what each took.

`python -m tests.sessions.measured_reading DIRECTORY MEMORY_MIB SECONDS KIND…` prints a JSON line each, {kind, peak_mib,
seconds, printed}. A process of its own: its peak is nobody else's, and what forgets its limits ends nobody else.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lockstep.sessions import Session, SessionError
from lockstep.sessions.limits import ReadLimits
from lockstep.sessions.verify import verify
from tests.sessions.hostile_files import make

_MOST = 4 << 30  # bytes of address space: what forgets its limit ends here, not the machine


def peak_mib() -> int:
    """The most memory that this process has had since the peak was forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) >> 10


def forget_peak() -> None:
    """Count the peak from now on (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def read_everything(path: Path, limits: ReadLimits) -> list[str]:
    """Ask the session for all that it has; what it refused."""
    stated: list[str] = []

    def attempt(ask: Callable[..., object], *arguments: object, **named: object) -> None:
        try:
            with session.view():
                ask(*arguments, **named)
        except SessionError as error:
            stated.append(str(error))

    try:
        session = Session.open(path, limits)
    except SessionError as error:
        return [str(error)]
    with session:
        attempt(session.events)
        attempt(session.verdicts)
        for branch in session.branches()[-2:]:
            attempt(session.captured_taps, branch.id)
            steps = session.steps(branch.id)
            for step in {0, 1, steps.stop - 1} & set(steps):
                for ask in (session.step, session.stats, session.checksums, session.captured):
                    attempt(ask, step, branch.id)
                for tap in session.taps[:2]:
                    for part in (None, ""):
                        attempt(session.tensor, tap.name, step=step, rank=0, branch=branch.id, slice=part)
                        attempt(session.rebuilt, tap.name, step=step, branch=branch.id, slice=part)
            for tap in session.taps[:2]:
                attempt(session.series, tap.name, "rms", 0, branch.id)
    return stated + verify(path, limits)


def main(directory: str, memory: str, seconds: str, *kinds: str) -> None:
    """Make, read and remove each, within these limits."""
    limits = ReadLimits(int(memory) << 20, float(seconds))
    resource.setrlimit(resource.RLIMIT_AS, (_MOST, _MOST))
    for kind in kinds:
        path = make(kind, Path(directory, f"{kind.replace(' ', '_')}.session"))
        forget_peak()
        began = time.process_time()
        stated = read_everything(path, limits)
        took = round(time.process_time() - began, 2)
        reported = {"kind": kind, "peak_mib": peak_mib(), "seconds": took, "printed": stated[:40]}
        print(json.dumps(reported), flush=True)
        path.unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
