"""A reference that contradicts itself: its decode steps give other logits than its own pass over the same tokens.

It proves nothing against an engine, which cannot agree with both. What an engine's operations do to their own recorded
inputs is evidence all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np

from lockstep.sessions import Session
from lockstep.sessions.text import clean
from lockstep.workbench.diagnosis.diagnose import Explanation
from lockstep.workbench.diagnosis.judgement import Judgement
from lockstep.workbench.diagnosis.verdict import FAIL
from lockstep.workbench.references.request import ONE_PASS, OnePass
from lockstep.workbench.words.numbers import number

#: What counts as noise where there is no floor, and the least that does not: of the largest logit.
_FIXED, _LEAST = 1e-4, 1e-7


def contradiction(golden: Session, floor: Session | None) -> str:
    """Where decode steps of `golden` leave its own pass by more than the noise that `floor` (the reference at the
    engine's dtype) has there, in words; "" where nowhere, and where it was not asked."""
    found = [
        (step, seq, apart) for seq, step, apart in _apart(golden) if apart > _noise(golden, floor, seq, step)
    ]
    if not found:
        return ""
    step, seq, apart = min(found)
    return (
        f"the reference contradicts itself: the logits of its decode step {step} (sequence {seq}) are {number(apart)} "
        f"away from those of its own pass over the same tokens ({clean(golden.meta.source, limit=40)})"
    )


def excused(judgement: Judgement, found: Explanation, why: str) -> Judgement:
    """The judgement against a reference that contradicts itself, `why` states where ("": it does not): "inconclusive"
    where no operation is wrong on its own inputs."""
    if not why:
        return judgement
    judgement = replace(judgement, notes=(*judgement.notes, why))
    if judgement.verdict != "diverged" or found.wrong:
        return judgement
    return replace(judgement, verdict="inconclusive", first_divergence=None)


def _apart(golden: Session) -> Iterator[tuple[int, int, float]]:
    """(sequence, step, max abs between its logits and those of one pass)."""
    for event in golden.events(kind=ONE_PASS):
        try:
            reported = msgspec.convert(event.data, OnePass, str_keys=True)
        except msgspec.ValidationError:  # a stranger may have written it
            continue
        for step, apart in reported.apart.items():
            yield reported.seq, step, math.inf if apart is None else apart


def _noise(golden: Session, floor: Session | None, seq: int, step: int) -> float:
    """Max abs that the logits of a step may be off by."""
    truth = golden.rebuilt("logits", step=step, seq=seq).array
    if truth is None or not np.isfinite(truth).all():
        return math.inf
    largest = float(np.abs(truth[-1]).max())
    if floor is None:
        return _FIXED * largest
    noisy = floor.rebuilt("logits", step=step, seq=seq).array
    own = 0.0 if noisy is None else float(np.abs(noisy[-1].astype(np.float64) - truth[-1]).max())
    return max(FAIL * own, _LEAST * largest)
