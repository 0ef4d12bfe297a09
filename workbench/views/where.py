"""The place that everything on screen follows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Where:
    """What the screen looks at: a branch, a step, a sequence, a tap (the present operation), a rank (None: all)."""

    branch: int = 0
    step: int = 0
    seq: int = 0
    tap: int = 0
    rank: int | None = None
