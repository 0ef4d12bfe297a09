"""The choice of the next token: candidates, how they moved since the last step, margin, golden's beside."""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.views.source import Source
from workbench.views.where import Where


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the top-k: its rank, what it was a step before (None: not among them), and golden's view of it."""

    rank: int
    token: int
    label: str
    logit: float
    probability: float | None
    rank_before: int | None
    chosen: bool
    golden_rank: int | None = None
    golden_probability: float | None = None


@dataclass(frozen=True, slots=True)
class Logits:
    """One step's choice. `margin` is the top-1 less the top-2 logit; `history` (margin, entropy, p of the
    chosen) of the last steps, this one last."""

    step: int
    candidates: tuple[Candidate, ...]
    margin: float | None
    entropy: float | None
    logsumexp: float | None
    forced: bool
    emitted: str | None
    covered: float | None
    has_golden: bool
    history: tuple[tuple[float | None, float | None, float | None], ...]


def logits(source: Source, where: Where, window: int = 48) -> Logits | None:
    """The choice at `where`; None while there is no such step."""
    steps = source.session.steps(where.branch)
    sequence = source.sequence(where.step, where.branch, where.seq) if where.step in steps else None
    if sequence is None:
        return None
    before: dict[int, int] = {}
    if where.step - 1 in steps:
        previous = source.sequence(where.step - 1, where.branch, where.seq)
        before = {t: i for i, t in enumerate(previous.topk_ids)} if previous else {}
    golden = _golden(source, where)
    chances = [_chance(logit, sequence.logsumexp) for logit in sequence.topk_logits]
    candidates = tuple(
        Candidate(
            rank,
            token,
            source.texts.label(token),
            logit,
            chance,
            before.get(token),
            token == sequence.emitted,
            *golden.get(token, (None, None)),
        )
        for rank, (token, logit, chance) in enumerate(
            zip(sequence.topk_ids, sequence.topk_logits, chances, strict=False)
        )
    )
    known = [chance for chance in chances if chance is not None]
    return Logits(
        step=where.step,
        candidates=candidates,
        margin=candidates[0].logit - candidates[1].logit if len(candidates) > 1 else None,
        entropy=sequence.entropy,
        logsumexp=sequence.logsumexp,
        forced=sequence.forced,
        emitted=source.texts.label(sequence.emitted) if sequence.emitted is not None else None,
        covered=sum(known) if known else None,
        has_golden=bool(golden),
        history=tuple(
            _history(source, where, step)
            for step in range(max(steps.start, where.step - window + 1), where.step + 1)
        ),
    )


def _chance(logit: float, logsumexp: float | None) -> float | None:
    return None if logsumexp is None else math.exp(min(0.0, logit - logsumexp))


def _golden(source: Source, where: Where) -> dict[int, tuple[int, float | None]]:
    """Rank and probability of each of the golden run's candidates at the same step."""
    golden = source.golden(where)
    if golden is None:
        return {}
    sequence = golden.sequence(where.step, 0, where.seq)
    if sequence is None:
        return {}
    pairs = zip(sequence.topk_ids, sequence.topk_logits, strict=False)
    return {token: (rank, _chance(logit, sequence.logsumexp)) for rank, (token, logit) in enumerate(pairs)}


def _history(source: Source, where: Where, step: int) -> tuple[float | None, float | None, float | None]:
    sequence = source.sequence(step, where.branch, where.seq)
    if sequence is None:
        return None, None, None
    tops = sequence.topk_logits
    margin = tops[0] - tops[1] if len(tops) > 1 else None
    chances = dict(zip(sequence.topk_ids, tops, strict=False))
    chosen = chances.get(sequence.emitted) if sequence.emitted is not None else None
    return margin, sequence.entropy, None if chosen is None else _chance(chosen, sequence.logsumexp)
