"""Where each sentinel first fires on a branch, for a report: all steps at once, within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lockstep.engine.taps.names import local_name
from lockstep.sessions import Session, Tap
from lockstep.workbench.views import sentinels
from lockstep.workbench.views.branch_sentinel import BranchSentinel, fired_at, why_blind
from lockstep.workbench.views.sentinels import NAMES, TAIL, SentinelFinding, SentinelKind
from lockstep.workbench.views.trail import Trail
from lockstep.workbench.words.plain_text import plural


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of one branch that a report looks at: those that it recorded itself."""

    session: Session
    trail: Trail
    branch: int
    steps: range
    label: Callable[[int], str]
    budget: int

    def clear(self, kind: SentinelKind, looked: str, name: str = "") -> BranchSentinel:
        return BranchSentinel(kind, name or NAMES[kind], self.branch, looked=looked)

    def fired(
        self, kind: SentinelKind, step: int, found: SentinelFinding, looked: str, name: str = ""
    ) -> BranchSentinel:
        return fired_at(self.session, kind, self.branch, step, found, looked, name)


def scan_steps(
    session: Session,
    trail: Trail,
    branch: int,
    steps: range,
    seqs: Sequence[int],
    label: Callable[[int], str],
    budget: int,
) -> list[BranchSentinel]:
    """Every sentinel over `steps` of one branch. `budget`: statistics values (taps × ranks × steps) to be read."""
    chosen = _Steps(session, trail, branch, steps, label, budget)
    return [
        _not_finite(chosen, "nan"),
        _not_finite(chosen, "inf"),
        _desync(chosen),
        _misaligned(chosen),
        *(_repetition(chosen, seq, len(seqs) > 1) for seq in seqs),
    ]


def _not_finite(chosen: _Steps, kind: Literal["nan", "inf"]) -> BranchSentinel:
    session, branch, steps = chosen.session, chosen.branch, chosen.steps
    whole = len(steps) * len(session.taps) * session.ranks <= chosen.budget
    if whole:
        candidates: Iterable[int] = steps
        looked = f"every tap at {plural(len(steps), 'step')}"
    else:
        hits = [_first_in_series(chosen, tap.name, kind) for tap in _streams(session)]
        candidates = sorted({step for step in hits if step is not None})[:1]
        looked = f"residual stream and logits at {plural(len(steps), 'step')}"
    seen = False
    for step in candidates:
        stats = session.stats(step, branch)
        seen |= stats is not None
        found = None if stats is None else sentinels.first_not_finite(session, stats, kind)
        if found is not None:
            return chosen.fired(kind, step, found, looked)
    return chosen.clear(
        kind, looked if seen or not whole or not len(steps) else "no statistics were recorded"
    )


def _streams(session: Session) -> list[Tap]:
    """The taps that whatever goes wrong in a layer flows into."""
    wanted = ("mlp_residual", "final_norm", "logits")
    return [tap for tap in session.taps if local_name(tap.name) in wanted] or list(session.taps[-1:])


def _first_in_series(chosen: _Steps, tap: str, statistic: str) -> int | None:
    first: list[int] = []
    for rank in range(chosen.session.ranks):
        steps, values = chosen.session.series(tap, statistic, rank, chosen.branch)
        hits = np.flatnonzero((values > 0) & (steps >= chosen.steps.start))
        if hits.size:
            first.append(int(steps[hits[0]]))
    return min(first, default=None)


def _desync(chosen: _Steps) -> BranchSentinel:
    """Replicas must be the same bits: their checksums show it."""
    session, steps = chosen.session, chosen.steps
    if blind := why_blind(session, chosen.branch, "desync"):
        return chosen.clear("desync", blind)
    fits = max(16, chosen.budget // max(1, len(session.taps) * session.ranks))
    near = steps if len(steps) <= fits else [*steps[: fits // 2], *steps[-(fits // 2) :]]
    looked = f"replicated taps at {plural(len(near), 'step')}"
    looked += "" if len(near) == len(steps) else f" of {len(steps)} (first and last)"
    seen = False
    for step in near:
        checksums = session.checksums(step, chosen.branch)
        seen |= checksums is not None
        found = sentinels.desync(session, checksums)
        if found is not None:
            return chosen.fired("desync", step, found, looked)
    return chosen.clear("desync", looked if seen or not len(steps) else "no checksums were recorded")


def _steps_text(chosen: _Steps) -> str:
    """The steps of which what happened can be read."""
    damaged = chosen.trail.damaged
    number = sum((chosen.session.owner(step, chosen.branch), step) not in damaged for step in chosen.steps)
    rest = f" of {len(chosen.steps)}, the others are damaged" if number < len(chosen.steps) else ""
    return f"{plural(number, 'step')}{rest}"


def _misaligned(chosen: _Steps) -> BranchSentinel:
    looked = f"every sequence and rank at {_steps_text(chosen)}"
    for step in chosen.steps:
        found = chosen.trail.misaligned.get((chosen.session.owner(step, chosen.branch), step))
        if found is not None:
            return chosen.fired("cache", step, found, looked)
    return chosen.clear("cache", why_blind(chosen.session, chosen.branch, "cache") or looked)


def _repetition(chosen: _Steps, seq: int, several: bool) -> BranchSentinel:
    name = f"{NAMES['repetition']}, sequence {seq}" if several else ""
    looked = f"emitted tokens at {_steps_text(chosen)}"
    tokens: list[int] = []
    for step in range(chosen.steps.stop):  # what a parent emitted before counts
        token = chosen.trail.token(chosen.branch, step, seq)
        if token is not None:
            tokens = [*tokens[1 - TAIL :], token]
            found = sentinels.repetition(tokens, chosen.label) if step in chosen.steps else None
            if found is not None:
                return chosen.fired("repetition", step, found, looked, name)
    return chosen.clear("repetition", looked, name)
