"""The most memory that a process of ours has had resident."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil


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
