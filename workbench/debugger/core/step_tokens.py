"""Which token a step reads and emits: those of the chosen sequence, inside a step and between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.sessions.records import SequenceStep
from lockstep.workbench.debugger.answers import Position
from lockstep.workbench.debugger.core.executor import Flight
from lockstep.workbench.debugger.core.timeline import Timeline
from lockstep.workbench.views.sequences import fed


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The last token that a step reads, its position, and the token that it emits (None: none yet)."""

    read: int
    position: int
    emitted: int | None = None


def tokens_at(timeline: Timeline, at: Position, flight: Flight | None, seq: int) -> StepTokens | None:
    """The tokens of a sequence in the step at a position; None before the first step, and for a step that was not run
    or that did not feed the sequence."""
    reported = next((one for one in sequences_at(timeline, at, flight) if one.seq == seq), None)
    if reported is None or not fed(reported):
        return None
    return StepTokens(reported.ids[-1], reported.positions[-1], reported.emitted)


def sequences_at(timeline: Timeline, at: Position, flight: Flight | None) -> Sequence[SequenceStep]:
    """What the step at a position did to each sequence, or does to it by now; nothing for a step that was not run."""
    if flight is not None and flight.step == at.step:
        return flight.stopped.sequences
    return timeline.record(at.branch, at.step).sequences if 0 <= at.step <= timeline.last(at.branch) else ()
