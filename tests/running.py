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
