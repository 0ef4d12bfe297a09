"""The tokens of each sequence, branches side by side: step by step, the first difference marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sessions import SequenceStep, Session
from workbench.views.request import Limits
from workbench.views.token_texts import TokenTexts
from workbench.views.trail import Trail

#: Steps shown around each place of interest where not all can be.
_AROUND = 24


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the likeliest tokens of a step."""

    label: str
    token: int
    probability: float | None
    logit: float
    chosen: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The token emitted at a step. `probability` None: not among the recorded candidates."""

    step: int
    label: str
    probability: float | None
    entropy: float | None
    forced: bool
    differs: bool
    own: bool  # recorded by this branch, not shared with a parent
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One branch: a choice for each shown step, None where it has no such step or emitted nothing."""

    branch: int
    name: str
    choices: tuple[Choice | None, ...]
    first_difference: int | None  # from the first line


@dataclass(frozen=True, slots=True)
class Tokens:
    """One sequence. `steps` are shown; `prompt` holds labels with `prompt_cut` left out in its middle (at
    `prompt_cut_at`); `gaps` are (step after which, how many steps are left out)."""

    seq: int
    prompt: tuple[str, ...]
    prompt_cut: int
    prompt_cut_at: int
    steps: tuple[int, ...]
    gaps: tuple[tuple[int, int], ...]
    lines: tuple[Line, ...]


def tokens_of(
    session: Session,
    trail: Trail,
    texts: TokenTexts,
    seq: int,
    branches: Sequence[tuple[int, str]],
    interesting: Sequence[int],
    limits: Limits,
) -> Tokens:
    """The sequence's prompt and what `branches` (id, name) made of it. `interesting` steps are always shown."""
    longest = max((session.steps(branch) for branch, _ in branches), key=len, default=range(0))
    first, *others = [branch for branch, _ in branches]
    differences = {
        branch: trail.first_difference(first, branch, _common(session, first, branch), seq)
        for branch in others
    }
    forks = [session.own_steps(branch).start for branch in others]
    marks = [*interesting, *(k for k in differences.values() if k is not None), *forks]
    steps = _shown(longest, marks, limits.steps)
    lines = tuple(
        Line(
            branch,
            name,
            tuple(_choice(session, trail, texts, (branch, first), k, seq, limits) for k in steps),
            differences.get(branch),
        )
        for branch, name in branches
    )
    prompt = _prompt(session, first, seq)
    half = limits.prompt_tokens // 2
    cut = max(0, len(prompt) - limits.prompt_tokens)
    kept = prompt if not cut else [*prompt[:half], *prompt[len(prompt) - half :]]
    gaps = [(a, b - a - 1) for a, b in zip(steps, [*steps[1:], longest.stop], strict=True) if b - a > 1]
    return Tokens(
        seq,
        tuple(texts.label(token) for token in kept),
        len(prompt) - len(kept),
        half if cut else len(kept),
        tuple(steps),
        tuple(gaps),
        lines,
    )


def _common(session: Session, one: int, other: int) -> range:
    return range(min(len(session.steps(one)), len(session.steps(other))))


def _shown(steps: range, marks: Sequence[int], limit: int) -> list[int]:
    """All steps, or as many as the limit allows: around each mark (the first matter most), the end, the beginning."""
    if len(steps) <= limit:
        return list(steps)
    chosen: set[int] = {steps.start, steps.stop - 1}
    for mark in dict.fromkeys(marks):
        around = range(max(steps.start, mark - _AROUND), min(steps.stop, mark + _AROUND + 1))
        if len(chosen | set(around)) <= limit:
            chosen |= set(around)
    spare = limit - len(chosen)
    tail = steps[-(spare // 3) :] if spare >= 3 else range(0)
    chosen |= set(tail)
    for step in steps:
        if len(chosen) >= limit:
            break
        chosen.add(step)
    return sorted(chosen)


def _prompt(session: Session, branch: int, seq: int) -> list[int]:
    """What the sequence read before it emitted its first token (a prefill may come in chunks)."""
    ids: list[int] = []
    for step in session.steps(branch):
        told = _told(session, branch, step, seq)
        if told is not None:
            ids += told.ids
            if told.emitted is not None:
                break
    return ids


def _told(session: Session, branch: int, step: int, seq: int) -> SequenceStep | None:
    return next((s for s in session.step(step, branch).sequences if s.seq == seq), None)


def _choice(
    session: Session,
    trail: Trail,
    texts: TokenTexts,
    sides: tuple[int, int],
    step: int,
    seq: int,
    limits: Limits,
) -> Choice | None:
    """What the first of `sides` emitted; it differs where the second emitted another token."""
    branch, reference = sides
    if step not in session.steps(branch):
        return None
    told = _told(session, branch, step, seq)
    if told is None or told.emitted is None:
        return None
    candidates = tuple(
        Candidate(texts.label(token), token, _chance(logit, told.logsumexp), logit, token == told.emitted)
        for token, logit in zip(
            told.topk_ids[: limits.candidates], told.topk_logits[: limits.candidates], strict=False
        )
    )
    logits = dict(zip(told.topk_ids, told.topk_logits, strict=False))
    there = step in session.steps(reference)
    return Choice(
        step,
        texts.label(told.emitted),
        _chance(logits[told.emitted], told.logsumexp) if told.emitted in logits else None,
        told.entropy,
        told.forced,
        there and trail.token(branch, step, seq) != trail.token(reference, step, seq),
        session.owner(step, branch) == branch,
        candidates,
    )


def _chance(logit: float, logsumexp: float | None) -> float | None:
    """The probability of a logit; NaN where the logits are NaN."""
    if logsumexp is None:
        return None
    difference = logit - logsumexp
    return math.exp(min(0.0, difference)) if not math.isnan(difference) else math.nan
