"""The candidates for the next token of one sequence at one step, as they were recorded, with their probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.sessions.records import SequenceStep
from lockstep.workbench.views.token_texts import TokenTexts


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the top-k. `probability` is None where the normaliser was not recorded, NaN where logits are NaN."""

    label: str
    token: int
    probability: float | None
    logit: float
    chosen: bool


def candidates(recorded: SequenceStep, texts: TokenTexts, count: int | None = None) -> tuple[Candidate, ...]:
    """The likeliest tokens, best first: all that were recorded, or `count` of them."""
    pairs = list(zip(recorded.topk_ids, recorded.topk_logits, strict=False))[:count]
    return tuple(
        Candidate(
            texts.label(token),
            token,
            probability(logit, recorded.logsumexp),
            logit,
            token == recorded.emitted,
        )
        for token, logit in pairs
    )


def probability(logit: float, logsumexp: float | None) -> float | None:
    """The probability of a logit, 1 at most: rounding may put a certain token's logit above the normaliser."""
    if logsumexp is None:
        return None
    exponent = logit - logsumexp
    return math.nan if math.isnan(exponent) else math.exp(min(0.0, exponent))


def probabilities(recorded: SequenceStep | None) -> dict[int, float]:
    """By token, of the recorded candidates; empty where the normaliser was not recorded."""
    if recorded is None:
        return {}
    pairs = zip(recorded.topk_ids, recorded.topk_logits, strict=False)
    found = {token: probability(logit, recorded.logsumexp) for token, logit in pairs}
    return {token: chance for token, chance in found.items() if chance is not None}


def emitted_probability(recorded: SequenceStep | None) -> float | None:
    """The probability that the model gave to the emitted token; None where it is not among the candidates."""
    return (
        None
        if recorded is None or recorded.emitted is None
        else probabilities(recorded).get(recorded.emitted)
    )


def margin(recorded: SequenceStep) -> float | None:
    """The first logit less the second."""
    return recorded.topk_logits[0] - recorded.topk_logits[1] if len(recorded.topk_logits) > 1 else None


def first_difference(ours: Iterable[int | None], theirs: Iterable[int | None]) -> int | None:
    """Where two sequences of tokens first differ, as far as both go; None: nowhere."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
