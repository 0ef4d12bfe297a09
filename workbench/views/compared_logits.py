"""The choice of the next token on two sides: candidates beside each other, how they moved, how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lockstep.sessions.records import SequenceStep
from lockstep.workbench.views.candidates import Candidate, candidates
from lockstep.workbench.views.sides import Other, sides
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where

#: A probability that sums of probabilities, of logits in float32, cannot distinguish from none.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class RankedOn:
    """A candidate on one side, with its rank there from 0."""

    rank: int
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class ComparedCandidate:
    """One token on both sides; None where it is not among the recorded candidates."""

    label: str
    token: int
    ours: RankedOn | None
    theirs: RankedOn | None

    @property
    def moved(self) -> int | None:
        """How many ranks higher it is on the other side; None where a side does not report it."""
        return None if self.ours is None or self.theirs is None else self.ours.rank - self.theirs.rank


@dataclass(frozen=True, slots=True)
class ComparedLogits:
    """Both choices. `divergence` is the Kullback–Leibler divergence D(ours‖theirs) in nats as far as the recorded
    candidates show: the true one is no less. NaN where a side's figures are NaN; None where a side does not report it,
    or other tokens went in. `overlap`: how many tokens are candidates on both sides."""

    step: int
    names: tuple[str, str]
    why_not: str
    rows: tuple[ComparedCandidate, ...]
    divergence: float | None
    overlap: int


def compared_logits(
    source: SessionSource, where: Where, other: Other, parted: int | None = None
) -> ComparedLogits:
    """The choice at `where` and on the other side."""
    both = sides(source, where, other, parted)
    reported = (
        source.sequence(where.step, where.branch, where.seq)
        if where.step in source.session.steps(where.branch)
        else None
    )
    theirs = (
        None if both.lacks_step else both.theirs.sequence(both.there.step, both.there.branch, both.there.seq)
    )
    ours, others = _ranked(source, reported), _ranked(source, theirs)
    tokens = dict.fromkeys((*ours, *others))
    rows = tuple(
        ComparedCandidate(source.texts.label(token), token, ours.get(token), others.get(token))
        for token in tokens
    )
    return ComparedLogits(
        where.step,
        both.names,
        both.why_not,
        rows,
        None if both.why_not else divergence(reported, theirs),
        len(ours.keys() & others.keys()),
    )


def _ranked(source: SessionSource, recorded: SequenceStep | None) -> dict[int, RankedOn]:
    if recorded is None:
        return {}
    return {one.token: RankedOn(rank, one) for rank, one in enumerate(candidates(recorded, source.texts))}


def divergence(ours: SequenceStep | None, theirs: SequenceStep | None) -> float | None:
    """See `ComparedLogits`. Infinite where one side rules out what the other may choose.

    What only we recorded had on their side at most what theirs left over, and the other way about. Within these bounds
    the masses are put where the divergence is least.
    """
    p, q = _logarithms(ours), _logarithms(theirs)
    if not p or not q:
        return None
    if any(math.isnan(one) for one in (*p.values(), *q.values())):
        return math.nan
    shared = p.keys() & q.keys()
    total = math.fsum(_term(p[token], q[token]) for token in shared)
    left, right = (_mass(side, side.keys()) for side in (p, q))  # of all candidates
    beyond, others = (max(0.0, 1.0 - _mass(side, shared)) for side in (p, q))  # of all that is not shared
    only_theirs = _mass(q, q.keys() - shared)
    on_theirs = min(beyond * only_theirs / others if others else 0.0, max(0.0, 1.0 - left))
    for mass, counter in ((on_theirs, only_theirs), (beyond - on_theirs, 1.0 - right)):
        if mass > _ROUNDING:
            total += mass * math.log(mass / max(counter, _ROUNDING))
    return max(0.0, total)


def _logarithms(recorded: SequenceStep | None) -> dict[int, float]:
    """The logarithm of each candidate's probability; none where the normaliser was not recorded."""
    if recorded is None or recorded.logsumexp is None:
        return {}
    pairs = zip(recorded.topk_ids, recorded.topk_logits, strict=False)
    return {
        token: min(0.0, logit - recorded.logsumexp) if logit == logit else math.nan for token, logit in pairs
    }


def _term(p: float, q: float) -> float:
    """What a token adds to the divergence, by the logarithms of its probabilities."""
    return math.exp(p) * (p - q) if p > -math.inf else 0.0


def _mass(side: Mapping[int, float], tokens: Iterable[int]) -> float:
    return math.fsum(math.exp(side[token]) for token in tokens)
