"""Whether a process that is waited for is stopped, waits or computes (torch-free)."""

from __future__ import annotations

import time
from dataclasses import dataclass

#: Most seconds between two looks that count as waiting: this process itself was stopped meanwhile, or its machine was.
_LONGEST_LOOK = 1.0
#: The least share of a processor that a rank at work has: on an overloaded machine it gets little.
_LEAST_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Vitals:
    """A process: its state as psutil names it, "stopped" for instance ("" where unknown), processor seconds used so
    far, and, of one that reports from elsewhere, for how many seconds it has not (0 while it does)."""

    pid: int
    state: str
    processor: float
    silent: float = 0.0

    @property
    def stopped(self) -> bool:
        """Whether it cannot go on by itself."""
        return self.state in ("stopped", "tracing-stop", "zombie", "gone")

    @property
    def held(self) -> bool:
        """Whether somebody has stopped it, who can continue it."""
        return self.state in ("stopped", "tracing-stop")

    def at_work(self, before: Vitals, seconds: float) -> bool:
        """Whether it has computed, or read from a disk, in so many seconds since `before`."""
        if self.stopped:
            return False
        busy = self.state in ("running", "disk-sleep")
        return busy or self.processor - before.processor > _LEAST_SHARE * seconds

    def describe(self) -> str:
        """In words."""
        who = f"its process (pid {self.pid})" if self.pid else "its process"
        if self.silent:
            return f"nothing was heard of {who} for {self.silent:.0f} s"
        match self.state:
            case "stopped":
                return f"{who} is stopped (state T: SIGSTOP or SIGTSTP)"
            case "tracing-stop":
                return f"{who} is stopped by a tracer (state t: gdb, strace)"
            case "running":
                return f"{who} computes (state R, {self.processor:.1f} s of processor time)"
            case "disk-sleep":
                return f"{who} waits for a disk (state D)"
            case state:
                return f"{who} is {state or 'alive'} ({self.processor:.1f} s of processor time)"


def vitals_of(pid: int) -> Vitals:
    """Those of a process on this machine."""
    import psutil  # here: screens paint first, and look only where nothing is heard

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return Vitals(pid, process.status(), times.user + times.system)
    except psutil.NoSuchProcess:
        return Vitals(pid, "gone", 0.0)
    except psutil.AccessDenied:
        return Vitals(pid, "", 0.0)


class Waiting:
    """For how long one has waited in vain; look often. Time for which this process stood still itself does not count:
    what it would have heard may be on its way."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked = time.monotonic()

    def look(self) -> float:
        """Seconds waited since `restart`."""
        now = time.monotonic()
        self.seconds += min(now - self._looked, _LONGEST_LOOK)
        self._looked = now
        return self.seconds

    def restart(self) -> None:
        """Something has come: wait anew."""
        self.seconds = 0.0
