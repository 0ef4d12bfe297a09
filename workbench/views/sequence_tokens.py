"""The tokens of each sequence, branches side by side: step by step, the first difference marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.sessions import SequenceStep, Session
from lockstep.sessions.errors import SessionDamaged
from lockstep.workbench.views.candidates import Candidate, candidates, emitted_probability, first_difference
from lockstep.workbench.views.request import Limits
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.trail import Trail

#: Steps shown around each place of interest where not all can be.
_AROUND = 24


@dataclass(frozen=True, slots=True)
class EmittedToken:
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
class BranchTokens:
    """One branch: a choice for each shown step, None where it has no such step or emitted nothing."""

    branch: int
    name: str
    choices: tuple[EmittedToken | None, ...]
    first_difference: int | None  # from the first line


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """One sequence. `steps` are shown; `prompt` holds labels with `prompt_cut` left out in its middle (at
    `prompt_cut_at`); `gaps` are (step after which, how many steps are left out)."""

    seq: int
    prompt: tuple[str, ...]
    prompt_cut: int
    prompt_cut_at: int
    steps: tuple[int, ...]
    gaps: tuple[tuple[int, int], ...]
    lines: tuple[BranchTokens, ...]


def tokens_of(
    source: SessionSource,
    trail: Trail,
    seq: int,
    branches: Sequence[tuple[int, str]],
    interesting: Sequence[int],
    limits: Limits,
) -> SequenceTokens:
    """The sequence's prompt and what `branches` (id, name) made of it. `interesting` steps are always shown."""
    session = source.session
    longest = max((session.steps(branch) for branch, _ in branches), key=len, default=range(0))
    first, *others = [branch for branch, _ in branches]
    differences = {branch: _first_difference(session, trail, (first, branch), seq) for branch in others}
    forks = [session.own_steps(branch).start for branch in others]
    marks = [*interesting, *(k for k in differences.values() if k is not None), *forks]
    steps = _shown(longest, marks, limits.steps)
    lines = tuple(
        BranchTokens(
            branch,
            name,
            tuple(_choice(source, trail, (branch, first), k, seq, limits) for k in steps),
            differences.get(branch),
        )
        for branch, name in branches
    )
    prompt = _prompt(source, first, seq)
    half = limits.prompt_tokens // 2
    cut = max(0, len(prompt) - limits.prompt_tokens)
    kept = prompt if not cut else [*prompt[:half], *prompt[len(prompt) - half :]]
    gaps = [(a, b - a - 1) for a, b in zip(steps, [*steps[1:], longest.stop], strict=True) if b - a > 1]
    return SequenceTokens(
        seq,
        tuple(source.texts.label(token) for token in kept),
        len(prompt) - len(kept),
        half if cut else len(kept),
        tuple(steps),
        tuple(gaps),
        lines,
    )


def _first_difference(session: Session, trail: Trail, branches: tuple[int, int], seq: int) -> int | None:
    """The first step at which the two emitted different tokens."""
    one, other = branches
    steps = [step for step in session.steps(one) if step in session.steps(other)]
    index = first_difference(*([trail.token(branch, step, seq) for step in steps] for branch in branches))
    return None if index is None else steps[index]


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


def _readable(source: SessionSource, step: int, branch: int, seq: int) -> SequenceStep | None:
    """What a step did to the sequence; None also where that is damaged, which the trail reports."""
    try:
        return source.sequence(step, branch, seq)
    except SessionDamaged:
        return None


def _prompt(source: SessionSource, branch: int, seq: int) -> list[int]:
    """What the sequence read before it emitted its first token (a prefill may come in chunks)."""
    ids: list[int] = []
    for step in source.session.steps(branch):
        reported = _readable(source, step, branch, seq)
        if reported is not None:
            ids += reported.ids
            if reported.emitted is not None:
                break
    return ids


def _choice(
    source: SessionSource, trail: Trail, sides: tuple[int, int], step: int, seq: int, limits: Limits
) -> EmittedToken | None:
    """What the first of `sides` emitted; it differs where the second emitted another token."""
    branch, reference = sides
    session = source.session
    reported = _readable(source, step, branch, seq) if step in session.steps(branch) else None
    if reported is None or reported.emitted is None:
        return None
    there = step in session.steps(reference)
    return EmittedToken(
        step,
        source.texts.label(reported.emitted),
        emitted_probability(reported),
        reported.entropy,
        reported.forced,
        there and trail.token(branch, step, seq) != trail.token(reference, step, seq),
        session.owner(step, branch) == branch,
        candidates(reported, source.texts, limits.candidates),
    )
