"""One candidate over all steps: its probability and its rank wherever it was among the recorded candidates."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lockstep.sessions.errors import SessionDamaged
from lockstep.workbench.views.candidates import probability
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where

#: Seconds that one question may take: a long text's steps are read in parts.
_BUDGET = 0.03


@dataclass(frozen=True, slots=True)
class CandidatePoint:
    """At a step: the rank from 0 and the probability, None where it was not among the top-k (or nothing is known of
    it); `emitted`: what the step emitted."""

    step: int
    rank: int | None
    probability: float | None
    emitted: str
    chosen: bool


@dataclass(frozen=True, slots=True)
class CandidateHistory:
    """A token over the steps of a branch, as far as they were read; `complete`: all of them. `topk` is the most
    candidates that a step has."""

    branch: int
    seq: int
    token: int
    label: str
    points: tuple[CandidatePoint, ...] = ()
    topk: int = 0
    complete: bool = False

    @property
    def best(self) -> CandidatePoint | None:
        """Where it had its best rank, the likeliest of those."""
        ranked = [(p.rank, -(p.probability or 0), i) for i, p in enumerate(self.points) if p.rank is not None]
        return self.points[min(ranked)[2]] if ranked else None


def candidate_history(
    source: SessionSource, where: Where, token: int, so_far: CandidateHistory | None = None
) -> CandidateHistory:
    """The token over all steps of the branch and sequence of `where`; asked again with what it answered `so_far`, it
    reads on."""
    known = so_far
    if known is None or (known.branch, known.seq, known.token) != (where.branch, where.seq, token):
        known = CandidateHistory(where.branch, where.seq, token, source.texts.label(token))
    steps, points, topk = source.session.steps(where.branch), list(known.points), known.topk
    deadline = time.monotonic() + _BUDGET
    for step in range(steps.start + len(points), steps.stop):
        point, many = _point(source, where, step, token)
        points.append(point)
        topk = max(topk, many)
        if time.monotonic() > deadline:
            break
    complete = len(points) >= len(steps)
    return CandidateHistory(where.branch, where.seq, token, known.label, tuple(points), topk, complete)


def _point(source: SessionSource, where: Where, step: int, token: int) -> tuple[CandidatePoint, int]:
    try:
        reported = source.sequence(step, where.branch, where.seq)
    except SessionDamaged:  # the strip marks it
        reported = None
    if reported is None:
        return CandidatePoint(step, None, None, "", False), 0
    emitted = source.texts.label(reported.emitted) if reported.emitted is not None else ""
    ids = list(reported.topk_ids)
    rank = ids.index(token) if token in ids else None
    share = None
    if rank is not None and rank < len(reported.topk_logits):
        share = probability(reported.topk_logits[rank], reported.logsumexp)
    return CandidatePoint(step, rank, share, emitted, reported.emitted == token), len(reported.topk_ids)
