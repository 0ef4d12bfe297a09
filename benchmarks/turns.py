"""Contenders in turns, and how they stand to the first of them."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping

#: Does the work once; returns its seconds.
Timed = Callable[[], float]


def in_turns(contenders: Mapping[str, Timed], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender, `rounds` of them. A turn before these warms up, and is not among them."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, timed in contenders.items():
            taken = timed()
            if turn:
                seconds[name].append(taken)
    return seconds


def report(seconds: Mapping[str, list[float]], heading: str, *, as_json: bool) -> None:
    """A line a contender: median and least, and both over those of the first."""
    base = next(iter(seconds.values()))
    rows = [
        {
            "name": name, "s": round(statistics.median(some), 3), "least_s": round(min(some), 3),
            "of_first": round(statistics.median(some) / statistics.median(base), 3),
            "of_least": round(min(some) / min(base), 3),
        }
        for name, some in seconds.items()
    ]  # fmt: skip
    if as_json:
        json.dump(rows, sys.stdout, indent=1)
        return
    print(f"{heading}, load average {os.getloadavg()[0]:.1f}")
    for row in rows:
        print("{name:14} {s:8.3f} s (least {least_s:.3f})  {of_first:.3f} x ({of_least:.3f})".format(**row))
