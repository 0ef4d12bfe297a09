"""The chosen sequence of a batch, and commands that name another."""

from __future__ import annotations

import re

from lockstep.sessions.records import SequenceStep
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.motion import require_step
from lockstep.workbench.debugger.errors import CommandError, NotCaptured
from lockstep.workbench.views.sequences import Sequences, fed

_SEQUENCE = re.compile(r"\bseq(?:uence)?\s+(\d+)\s*$")


def batch_of(debugger: Debugger) -> Sequences:
    """The sequences of the branch that is stood on."""
    return debugger.timeline.batch(debugger.position.branch)


def check_sequence(debugger: Debugger, seq: int) -> int:
    """The sequence; CommandError where there is none of that number."""
    batch = batch_of(debugger)
    if seq not in batch.fed:
        raise CommandError(f"there is no sequence {seq}: {batch.listed()}")
    return seq


def sequence_of(debugger: Debugger, text: str) -> tuple[str, int]:
    """A text and the sequence of a trailing `seq S`, the chosen one where there is no such end."""
    match = _SEQUENCE.search(text)
    if match is None:
        return text.strip(), debugger.sequence
    return text[: match.start()].strip(), check_sequence(debugger, int(match[1]))


def finished_step(debugger: Debugger, seq: int) -> SequenceStep:
    """What the present step, which is over, did to a sequence. An error where it is not, or did not feed it."""
    at = require_step(debugger)
    if at.step > debugger.timeline.last(at.branch):
        raise CommandError(f"step {at.step} is not finished: `next` finishes it")
    reported = debugger.timeline.sequence(at.branch, at.step, seq)
    if reported is None or not fed(reported):
        raise NotCaptured(batch_of(debugger).why_absent(seq, at.step))
    return reported


def titled(debugger: Debugger, title: str, seq: int) -> str:
    """A title that names the sequence where there are several."""
    label = batch_of(debugger).label(seq)
    return f"{title}, {label}" if label else title
