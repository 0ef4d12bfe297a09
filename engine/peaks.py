"""The most memory that a process has held at a time: of the host's, or, where it computes there, of its GPU's."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

import psutil


class Held(NamedTuple):
    """Bytes that a process holds, and the most that it has held since it was asked before."""

    now: int
    peak: int


def held_on(device: str) -> Held:
    """What this process holds: of the memory of a GPU ("cuda:0") that torch has given out, or of the host's."""
    if device.startswith("cuda"):
        import torch  # which whoever computes there has imported

        held = Held(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        return held
    held = Held(resident(os.getpid()), peak_of(os.getpid()))
    start_over(os.getpid())
    return held


def start_over(pid: int) -> None:
    """Forget the peak so far (proc(5), clear_refs: 5). Where that cannot be done it is that since the process began."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def resident(pid: int) -> int:
    """Bytes resident now; 0 of a process that is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def peak_of(pid: int) -> int:
    """The most bytes resident since `start_over`; without /proc those of now."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return resident(pid)
    found = next((line for line in lines if line.startswith("VmHWM:")), "")
    return int(found.split()[1]) << 10 if found else resident(pid)
