"""The choice of the next token: candidates, how they moved since the last step, margin, golden's beside."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.sessions.records import SequenceStep
from lockstep.workbench.views.candidates import (
    Candidate,
    candidates,
    emitted_probability,
    margin,
    probabilities,
)
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where

Figures = tuple[float | None, float | None, float | None]


@dataclass(frozen=True, slots=True)
class RankedCandidate:
    """A candidate with its rank from 0, its rank a step before (None: not among the top-k), and golden's rank and
    probability of the same token."""

    candidate: Candidate
    rank: int
    rank_before: int | None
    golden_rank: int | None
    golden_probability: float | None


@dataclass(frozen=True, slots=True)
class Logits:
    """One step's choice. `margin` is the top-1 less the top-2 logit; `covered` the probability of all candidates, NaN
    where one of theirs is; `history` (margin, entropy, p of the
    chosen) of the last steps, this one last."""

    step: int
    candidates: tuple[RankedCandidate, ...]
    margin: float | None
    entropy: float | None
    forced: bool
    emitted: str | None
    covered: float | None
    has_golden: bool
    history: tuple[Figures, ...]


def logits(source: SessionSource, where: Where, window: int = 48) -> Logits | None:
    """The choice at `where`; None while there is no such step."""
    steps = source.session.steps(where.branch)
    reported = source.sequence(where.step, where.branch, where.seq) if where.step in steps else None
    if reported is None:
        return None
    before = source.sequence(where.step - 1, where.branch, where.seq) if where.step - 1 in steps else None
    reference = source.golden(where)
    golden = reference.sequence(where.step, 0, where.seq) if reference is not None else None
    ranks, theirs, chances = _ranks(before), _ranks(golden), probabilities(golden)
    found = candidates(reported, source.texts)
    known = [one.probability for one in found if one.probability is not None]
    first = max(steps.start, where.step - window + 1)
    return Logits(
        step=where.step,
        candidates=tuple(
            RankedCandidate(one, i, ranks.get(one.token), theirs.get(one.token), chances.get(one.token))
            for i, one in enumerate(found)
        ),
        margin=margin(reported),
        entropy=reported.entropy,
        forced=reported.forced,
        emitted=source.texts.label(reported.emitted) if reported.emitted is not None else None,
        covered=_sum_of(known) if known else None,
        has_golden=bool(theirs),
        history=tuple(
            _figures(source.sequence(step, where.branch, where.seq)) for step in range(first, where.step + 1)
        ),
    )


def _sum_of(known: list[float]) -> float:
    """1 at most, for rounding; NaN stays."""
    total = math.fsum(known)
    return total if math.isnan(total) else min(1.0, total)


def _ranks(recorded: SequenceStep | None) -> dict[int, int]:
    return {} if recorded is None else {token: rank for rank, token in enumerate(recorded.topk_ids)}


def _figures(recorded: SequenceStep | None) -> Figures:
    return (
        (None, None, None)
        if recorded is None
        else (margin(recorded), recorded.entropy, emitted_probability(recorded))
    )
