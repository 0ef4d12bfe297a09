"""What the ranks hold of the weights, on the branch that the screen looks at."""

from __future__ import annotations

from workbench.held import Held
from workbench.held import held as held_on
from workbench.tui.snapshots.overview import Where
from workbench.tui.snapshots.source import Source

__all__ = ["Held", "held"]


def held(source: Source, where: Where) -> dict[str, dict[int, Held]]:
    """By parameter and rank; empty where nobody has looked on this branch."""
    return held_on(source.meta, where.branch)
