"""The states of recurrent layers over steps: their norm, and how much each step has changed them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.engine.graph import STATE_TAPS
from lockstep.sessions.errors import SessionError
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where

#: The most steps that are looked at.
_STEPS = 256


@dataclass(frozen=True, slots=True)
class StateHistory:
    """A layer's state of one sequence after each of the captured steps from `first` on: its L2 norm over all ranks, and
    the L2 norm of what the step has changed, over that before; NaN of the first one."""

    layer: int
    first: int
    norms: tuple[float, ...]
    changes: tuple[float, ...]


def state_histories(source: SessionSource, where: Where, layers: int) -> tuple[StateHistory, ...]:
    """Of the sequence of `where`, up to its step: of each layer whose states were captured, all steps without a gap."""
    last = source.passed(where).step
    found = []
    for layer in range(layers):
        names = [f"layers.{layer}.{one}" for one in STATE_TAPS]
        for tap in filter(source.session.has_tap, names):
            states = list(_back_from(source, where, tap, last))[::-1]
            if states:
                found.append(_history(layer, last - len(states) + 1, states))
    return tuple(found)


def _back_from(source: SessionSource, where: Where, tap: str, last: int) -> Iterator[np.ndarray]:
    """The states after the last step, the one before it, …, as far as they were captured."""
    for step in range(last, max(source.session.steps(where.branch).start, last - _STEPS + 1) - 1, -1):
        try:
            whole = source.session.rebuilt(tap, step=step, seq=where.seq, branch=where.branch).array
        except SessionError:  # the pane of that step states what is damaged
            return
        if whole is None:
            return
        yield np.asarray(whole, np.float64)


def _history(layer: int, first: int, states: list[np.ndarray]) -> StateHistory:
    norms = [float(np.linalg.norm(state)) for state in states]
    changes = [
        float(np.linalg.norm(after - before)) / norm if norm else float("nan")
        for before, after, norm in zip(states[:-1], states[1:], norms, strict=False)
    ]
    return StateHistory(layer, first, tuple(norms), (float("nan"), *changes))
