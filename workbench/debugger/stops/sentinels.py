"""Catchpoints that look at a whole step: ranks out of step, repetition, the end of the text, golden."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sessions import Session, Verdict
from workbench.debugger.core.timeline import Timeline

#: A text has collapsed when its last tokens are one phrase of at most so many tokens …
LONGEST_PHRASE = 32
#: … said so often, and in all so many tokens long.
REPEATS, SPAN = 4, 8


@dataclass(frozen=True, slots=True)
class Found:
    """A sentinel that has fired: where in the step (None: the step as a whole), on which ranks, in words."""

    place: int | None
    ranks: tuple[int, ...]
    words: str


def repeated_phrase(tokens: Sequence[int]) -> int:
    """The length of the phrase that the tokens end in over and over; 0 where they do not."""
    for length in range(1, LONGEST_PHRASE + 1):
        span = length * max(REPEATS, math.ceil(SPAN / length))
        tail = tokens[-span:]
        if len(tail) == span and all(tail[i] == tail[i - length] for i in range(length, span)):
            return length
    return 0


def desync(timeline: Timeline, branch: int, step: int) -> Found | None:
    """Replicas that differ between ranks."""
    found = timeline.desynchronised(branch, step)
    if found is None:
        return None
    place, ranks = found
    names = ", ".join(map(str, ranks))
    return Found(place, ranks, f"rank {names} differs at {timeline.places.names[place]}")


def repetition(timeline: Timeline, branch: int, step: int) -> Found | None:
    """The text has begun to repeat itself."""
    for told in timeline.record(branch, step).sequences:
        tokens = recent_tokens(timeline, branch, step, told.seq, LONGEST_PHRASE * REPEATS)
        length = repeated_phrase(tokens)
        before = repeated_phrase(tokens[:-1])
        if length and not before:
            return Found(None, (), f"the last {length} token{'s' * (length > 1)} repeat")
    return None


def recent_tokens(timeline: Timeline, branch: int, step: int, seq: int, count: int) -> list[int]:
    """The last `count` tokens that were emitted up to a step."""
    found: list[int] = []
    for k in range(step, -1, -1):
        told = timeline.sequence(branch, k, seq)
        if told is not None and told.emitted is not None:
            found.append(told.emitted)
        if len(found) == count:
            break
    return found[::-1]


def eos(timeline: Timeline, branch: int, step: int, eos_ids: Sequence[int]) -> Found | None:
    """A sequence has ended."""
    for told in timeline.record(branch, step).sequences:
        if told.emitted in eos_ids:
            return Found(None, (), f"sequence {told.seq} has ended")
    return None


def golden(timeline: Timeline, branch: int, step: int, reference: Session | None) -> Found | None:
    """The step has left the golden's tolerance: the first operation that `golden` failed in it, or, in a step
    that was never judged, its logits."""
    verdicts = judged(timeline, branch, step)
    if verdicts:
        failed = [one.tap for one in verdicts if one.verdict == "fail" and one.tap in timeline.places.names]
        if not failed:
            return None
        more = f", and {len(failed) - 1} after it" if len(failed) > 1 else ""
        return Found(timeline.places.exact(failed[0]), (), f"{failed[0]} has left its tolerance{more}")
    return None if reference is None else _logits(timeline, branch, step, reference)


def judged(timeline: Timeline, branch: int, step: int) -> list[Verdict]:
    """What `golden` found of a step, on this branch or on the one that ran it."""
    session = timeline.session
    if session is None:
        return []
    session.refresh()
    own = session.verdicts(branch=branch, step=step)
    return own or session.verdicts(branch=timeline.owner(branch, step).id, step=step)


def _logits(timeline: Timeline, branch: int, step: int, reference: Session) -> Found | None:
    """The step's likeliest token is another, or its logits are off by more than any rounding."""
    if step not in reference.steps(0):
        return None
    theirs = {told.seq: told for told in reference.step(step, 0).sequences}
    for ours in timeline.record(branch, step).sequences:
        other = theirs.get(ours.seq)
        if other is None or not ours.topk_ids or not other.topk_ids:
            continue
        if list(other.ids) != list(ours.ids):
            return Found(None, (), f"the golden read other ids at step {step}: record it again (`golden`)")
        mine = dict(zip(ours.topk_ids, ours.topk_logits, strict=True))
        if any(math.isnan(value) for value in ours.topk_logits):
            return Found(None, (), "the logits are NaN, the golden's are not")
        off = max(
            (abs(mine[i] - v) for i, v in zip(other.topk_ids, other.topk_logits, strict=True) if i in mine),
            default=math.inf,
        )
        scale = max(map(abs, other.topk_logits))
        if ours.topk_ids[0] != other.topk_ids[0] or off > LOGIT_TOLERANCE * max(scale, 1.0):
            return Found(None, (), f"logits are off by {off:.3g} (golden token {other.topk_ids[0]})")
    return None


#: Logits off by more than this share of the golden's largest have left it: far above float32 and bfloat16
#: rounding, so that the catchpoint does not stop for noise. `golden` judges finely.
LOGIT_TOLERANCE = 0.05
