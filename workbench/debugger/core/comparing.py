"""A toggle as a before and after: two branches of the same length, and the first token in which they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lockstep.workbench.debugger.answers import Position, Stop
from lockstep.workbench.debugger.core import sentinels
from lockstep.workbench.debugger.core.backwards import backward_to
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.forking import Switched
from lockstep.workbench.debugger.core.goal import Goal
from lockstep.workbench.debugger.core.motion import forward
from lockstep.workbench.debugger.core.step_end import eos_ids
from lockstep.workbench.debugger.core.timeline import Timeline
from lockstep.workbench.words.numbers import number
from lockstep.workbench.words.plain_text import plural

#: Steps that a branch and its parent go beyond the fork, at least.
AHEAD = 8


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first step at which two branches emit different tokens for a sequence."""

    step: int
    seq: int
    ours: int | None
    theirs: int | None


def before_and_after(debugger: Debugger, name: str, fork: Callable[[], Stop]) -> Stop:
    """Run the present branch ahead, fork, and run the new branch as far. Nothing stops the old one but the end of its
    text; the new one stops at breakpoints. What a catchpoint finds in it is reported to whoever goes on from here."""
    debugger.engine.land()
    at, timeline = debugger.position, debugger.timeline
    stop = run_ahead(debugger, at.branch, max(timeline.last(at.branch), at.step + AHEAD))
    if stop is not None:
        debugger.engine.land()
        debugger.position = at
        ran = f"{timeline.line(at.branch).name} ran ahead to step {timeline.last(at.branch)}"
        return debugger.stop(stop.reason, f"{stop.description}: {name} is not switched yet, {ran}")
    debugger.position = at
    stop = fork()
    last = timeline.last(at.branch)
    if stop.reason == "goto" and debugger.position.step < last:
        stop = forward(debugger, Goal(last=last, catching=False, reason="goto"))
    return compared(debugger, at) if stop.reason in ("goto", "end") else stop


def run_ahead(debugger: Debugger, branch: int, last: int) -> Stop | None:
    """Have a branch go on to step `last` or the end of its text; the stop that came before, None for none."""
    timeline, ends = debugger.timeline, eos_ids(debugger)
    debugger.position = Position(branch, timeline.last(branch))
    while (step := debugger.position.step) < last:
        if step >= 0 and sentinels.eos(timeline, branch, step, ends) is not None:
            return None
        stop = forward(debugger, Goal(last=step + 1, quiet=True, reason="goto"))
        if stop.reason != "goto":
            return None if stop.reason == "end" else stop
    return None


def compared(debugger: Debugger, at: Position) -> Stop:
    """On a branch that was forked at `at`: stand at the first different token, or where the user was: inside a step,
    and where nothing differs."""
    branch, timeline = debugger.position.branch, debugger.timeline
    begin = at.step + 1 if at.place is None else at.step
    found = first_difference(timeline, branch, at.branch, begin)
    moves = found is not None and at.place is None
    backward_to(debugger, Position(branch, found.step if found and moves else at.step, at.place))
    words = _words(debugger, branch, at.branch, begin, found)
    where = "" if moves else f"; still {_here(debugger)}"
    return debugger.stop("toggle", f"branch {branch} ({timeline.line(branch).name}): {words}{where}")


def switched_back(debugger: Debugger, switched: Switched) -> Stop:
    """Go back to the branch on which a rule was switched, as far as it goes."""
    left, timeline = debugger.position, debugger.timeline
    branch, last = switched.origin, timeline.last(switched.origin)
    backward_to(debugger, Position(branch, min(left.step, last), left.place if left.step <= last else None))
    begin = max(switched.step, 0)
    found = first_difference(timeline, branch, left.branch, begin)
    words = _words(debugger, branch, left.branch, begin, found)
    name = timeline.line(branch).name
    return debugger.stop("toggle", f"back on branch {branch} ({name}): {words}; now {_here(debugger)}")


def _here(debugger: Debugger) -> str:
    at = debugger.position
    if at.step < 0:
        return "before step 0"
    return f"at step {at.step}" + (
        "" if at.place is None else f", {debugger.timeline.places.names[at.place]}"
    )


def first_difference(timeline: Timeline, ours: int, theirs: int, begin: int) -> TokenDifference | None:
    """The first token from step `begin` on, as far as both go, in which two branches differ."""
    for step in range(max(begin, 0), min(timeline.last(ours), timeline.last(theirs)) + 1):
        other = {one.seq: one.emitted for one in timeline.record(theirs, step).sequences}
        for one in timeline.record(ours, step).sequences:
            if one.seq in other and one.emitted != other[one.seq]:
                return TokenDifference(step, one.seq, one.emitted, other[one.seq])
    return None


def _words(
    debugger: Debugger, ours: int, theirs: int, begin: int, found: TokenDifference | None
) -> str:  # fmt: skip
    """How two branches differ, in a sentence."""
    timeline = debugger.timeline
    other = timeline.line(theirs).name
    if found is not None:
        which = f" in sequence {found.seq}" if len(timeline.record(ours, found.step).sequences) > 1 else ""
        one, two = (_quoted(debugger, token) for token in (found.ours, found.theirs))
        return f"differs from {other} at step {found.step}{which}: {one} instead of {two}"
    end = min(timeline.last(ours), timeline.last(theirs)) + 1
    farthest = _farthest_logits(timeline, ours, theirs, range(end))
    by = "" if farthest is None else f", the likeliest tokens' logits differ by at most {number(farthest)}"
    if end <= begin:
        return f"no step after the fork to compare with {other}: toggle at an earlier step{by}"
    return f"same tokens as {other} for {plural(end - max(begin, 0), 'step')}{by}"


def _quoted(debugger: Debugger, token: int | None) -> str:
    return "nothing" if token is None else f"“{debugger.texts.label(token)}”"


def _farthest_logits(timeline: Timeline, ours: int, theirs: int, steps: Iterable[int]) -> float | None:
    """The greatest difference between recorded logits of the same token; None where none was recorded for both. NaN
    on either side is infinitely far, unless both are."""
    farthest = None
    for step in steps:
        for one in timeline.record(ours, step).sequences:
            other = timeline.sequence(theirs, step, one.seq)
            known = {} if other is None else dict(zip(other.topk_ids, other.topk_logits, strict=False))
            for token, logit in zip(one.topk_ids, one.topk_logits, strict=False):
                if token in known:
                    farthest = max(farthest or 0.0, _apart(logit, known[token]))
    return farthest


def _apart(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    apart = abs(a - b)
    return math.inf if math.isnan(apart) else apart
