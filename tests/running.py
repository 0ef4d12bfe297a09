"""Processes by their numbers."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def still_running(pids: Iterable[int]) -> list[psutil.Process]:
    """Those that are there, zombies included: any may end while it is looked up."""
    found = []
    for pid in pids:
        try:
            found.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    return found


def children_with(word: str, pid: int | None = None) -> list[psutil.Process]:
    """Children of a process, this one by default, of whose command line a word ends so. None that has ended, or ends
    while it is looked at: a zombie has no command line."""
    found = []
    for child in psutil.Process(pid).children():
        try:
            if any(one.endswith(word) for one in child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found
