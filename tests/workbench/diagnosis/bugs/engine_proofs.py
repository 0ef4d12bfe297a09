"""What a bug, or a control, does to our own engine's run, held against the same engine without it: no diagnosis."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.engine.taps.names import layer_of, local_name
from lockstep.sessions import Session
from lockstep.sessions.dtypes import widen
from tests.workbench.diagnosis.bugs.bug import Bug
from tests.workbench.diagnosis.bugs.recording import Recordings

#: What rounding alone may do at a tap, relative.
ROUNDING = {"float32": 2e-6, "bfloat16": 1e-2}
#: Taps of whole numbers.
CHOICES = ("mlp.topk_ids", "attn.index_chosen", "attn.shared_chosen")


def misplaced(bug: Bug, recordings: Recordings) -> str:
    """Where a bug shows first, if that is not its place, or why it is not to be seen there; "" if it is. Before its
    place every bit is that of the engine without it, on every rank."""
    place = bug.place
    with Session.open(recordings.spoilt(bug)) as ours, Session.open(recordings.faultless(bug)) as right:
        step, tap, ranks = next(differences(ours, right, recordings.steps), (0, "", set()))
        if not tap:
            return "nowhere"
        layer = place.layers[0] if place.layers else 0
        here = step == place.step and local_name(tap) in place.taps and layer_of(tap) in (layer, None)
        if not here or not (not place.ranks or ranks == set(place.ranks)):
            return f"{tap} at step {step} on ranks {sorted(ranks)}"
        far = max(_apart(a, b) for a, b, _ in _parts(ours, right, tap, step))
        if not far > 2 * _rounding(bug, tap):
            return f"{tap} is {far:.1e} apart"
        ends = {step, recordings.steps}  # what is wrong with a state shows in the logits of the next step
        end = max(_apart(a, b) for one in ends for a, b, _ in _parts(ours, right, "logits", one))
        return "" if end > 0 else "the logits are not changed"


def moved(bug: Bug, recordings: Recordings) -> str:
    """What is wrong with a control: it must change bits, and no more than rounding does; "" for nothing."""
    with Session.open(recordings.spoilt(bug)) as ours, Session.open(recordings.faultless(bug)) as right:
        found = list(differences(ours, right, recordings.steps))
        if not found:
            return "no bit is changed"
        step, tap, _ = found[0]
        far = max(_apart(a, b) for a, b, _ in _parts(ours, right, tap, step))
        if far > ROUNDING[bug.dtype]:
            return f"{tap} at step {step} is {far:.1e} apart"
        end = max(_apart(a, b) for a, b, _ in _parts(ours, right, "logits", recordings.steps))
        return "" if end <= 10 * ROUNDING[bug.dtype] else f"the logits are {end:.1e} apart"


def _rounding(bug: Bug, tap: str) -> float:
    """What is chosen is right or wrong."""
    return 0.0 if local_name(tap) in CHOICES else ROUNDING[bug.dtype]


def differences(ours: Session, right: Session, steps: int) -> Iterator[tuple[int, str, set[int]]]:
    """Step, tap and ranks of all that is not bit for bit the same, in the order of execution."""
    for step in range(steps + 1):
        for tap in ours.taps:
            ranks = {rank for a, b, rank in _parts(ours, right, tap.name, step) if not np.array_equal(a, b)}
            if ranks:
                yield step, tap.name, ranks


def _parts(
    ours: Session, right: Session, tap: str, step: int
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    for one in right.step(step).sequences:
        sides = [session.parts(tap, step=step, seq=one.seq) for session in (ours, right)]
        for rank in sides[1]:
            a, b = (widen(side[rank].array, side[rank].dtype) for side in sides)
            yield a, b, rank


def _apart(seen: np.ndarray, right: np.ndarray) -> float:
    finite = np.isfinite(right)
    if seen.shape != right.shape or not (np.isfinite(seen) == finite).all():
        return np.inf
    seen, right = seen[finite].astype(float), right[finite].astype(float)
    return float(np.linalg.norm(seen - right) / max(np.linalg.norm(right), 1e-30))
