"""What `catch` looks for when a step is over: ranks out of step, repetition, the end of the text, golden."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lockstep.sessions import Session
from lockstep.workbench.debugger.core.timeline import Timeline
from lockstep.workbench.views import sentinels
from lockstep.workbench.views.sentinels import SentinelFinding
from lockstep.workbench.views.verdicts import judged_at
from lockstep.workbench.words.numbers import number


def repetition(
    timeline: Timeline, branch: int, step: int, label: Callable[[int], str]
) -> SentinelFinding | None:
    """The text of a sequence has begun to repeat itself. `label` turns ids into text."""
    for reported in timeline.record(branch, step).sequences:
        tokens = _recent_tokens(timeline, branch, step, reported.seq, sentinels.TAIL)
        if not sentinels.repeated_phrase(tokens[:-1]) and (found := sentinels.repetition(tokens, label)):
            return found
    return None


def _recent_tokens(timeline: Timeline, branch: int, step: int, seq: int, count: int) -> list[int]:
    """The last `count` tokens that were emitted up to a step."""
    found: list[int] = []
    for k in range(step, -1, -1):
        reported = timeline.sequence(branch, k, seq)
        if reported is not None and reported.emitted is not None:
            found.append(reported.emitted)
        if len(found) == count:
            break
    return found[::-1]


def eos(timeline: Timeline, branch: int, step: int, eos_ids: Sequence[int]) -> SentinelFinding | None:
    """A sequence has ended."""
    return sentinels.ended(timeline.record(branch, step).sequences, eos_ids)


def golden(timeline: Timeline, branch: int, step: int, reference: Session | None) -> SentinelFinding | None:
    """The step has left the golden's tolerance: the first operation that `golden` failed in it, or, in a step
    that was never judged, its logits."""
    session = timeline.session
    if session is not None:
        session.refresh()
        judged = judged_at(session, branch, step)
        if judged:
            return sentinels.left_golden(session, judged)
    return None if reference is None else _logits(timeline, branch, step, reference)


def _logits(timeline: Timeline, branch: int, step: int, reference: Session) -> SentinelFinding | None:
    """The step's likeliest token is another, or its logits are off by more than any rounding."""
    if step not in reference.steps(0):
        return None
    theirs = {reported.seq: reported for reported in reference.step(step, 0).sequences}
    for ours in timeline.record(branch, step).sequences:
        other = theirs.get(ours.seq)
        if other is None or not ours.topk_ids or not other.topk_ids:
            continue
        if list(other.ids) != list(ours.ids):
            return SentinelFinding(f"the golden read other ids at step {step}: record it again (`golden`)")
        mine = dict(zip(ours.topk_ids, ours.topk_logits, strict=True))
        if any(math.isnan(value) for value in ours.topk_logits):
            return SentinelFinding("the logits are NaN, the golden's are not")
        off = max(
            (abs(mine[i] - v) for i, v in zip(other.topk_ids, other.topk_logits, strict=True) if i in mine),
            default=math.inf,
        )
        scale = max(map(abs, other.topk_logits))
        if ours.topk_ids[0] != other.topk_ids[0] or off > LOGIT_TOLERANCE * max(scale, 1.0):
            return SentinelFinding(f"logits are off by {number(off)} (golden token {other.topk_ids[0]})")
    return None


#: Logits off by more than this share of the golden's largest have left it: far above float32 and bfloat16
#: rounding, so that the catchpoint does not stop for noise. `golden` judges finely.
LOGIT_TOLERANCE = 0.05
