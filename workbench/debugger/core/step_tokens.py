"""Which token a step reads and emits: of several sequences, those of the first that takes part in the pass.

Stops, `where`, conditions (`position`, `token`, `kv_len`) and `expect` all mean this sequence, inside a step and
between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.debugger.answers import Position
from workbench.debugger.core.executor import Flight
from workbench.debugger.core.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The last token that a step reads, its position, and the token that it emits (None: none yet)."""

    read: int
    position: int
    emitted: int | None = None


def tokens_at(timeline: Timeline, at: Position, flight: Flight | None) -> StepTokens | None:
    """The tokens of the step at a position; None before the first step, and for a step that was not run or that fed
    nothing."""
    if flight is not None and flight.step == at.step:
        names = flight.stopped.names[0]
        return StepTokens(int(names["token"]), int(names["position"]))
    if not 0 <= at.step <= timeline.last(at.branch):
        return None
    told = timeline.first_fed(at.branch, at.step)
    return None if told is None else StepTokens(told.ids[-1], told.positions[-1], told.emitted)
