"""Measure everything that an engine recorded against the golden session, before any of it is judged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lockstep.sessions.errors import IdsMismatch
from lockstep.sessions.layouts import Rebuilt
from lockstep.sessions.metrics import Metrics
from lockstep.sessions.session import Session
from lockstep.workbench.diagnosis.compare import TapComparison, compare
from lockstep.workbench.diagnosis.floors import Floors, Place
from lockstep.workbench.diagnosis.judgement import DiagnosisError
from lockstep.workbench.diagnosis.recording import Recording
from lockstep.workbench.views.moved import ROUNDING


@dataclass(frozen=True, slots=True)
class Recordings:
    """The three sides of a comparison: `floor` is the reference at the engine's dtype, if there is one.

    The reference's own error at a place is measured once, for all engines that are `held` against it."""

    engine: Recording
    golden: Recording
    floor: Recording | None
    _known: dict[Place, tuple[Metrics | None, float]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, engine: Session, golden: Session, floor: Session | None = None, branch: int = 0
    ) -> Recordings:
        """The engine's `branch` beside the reference."""
        return cls(Recording(engine, branch), Recording(golden), None if floor is None else Recording(floor))

    def held(self, engine: Session) -> Recordings:
        """Another recording of the engine beside the same reference."""
        return replace(self, engine=Recording(engine))

    @property
    def two_libraries(self) -> bool:
        """Whether golden and floor are of different makers, so that they check each other."""
        return self.floor is not None and self.floor.session.meta.source != self.golden.session.meta.source


@dataclass(frozen=True, slots=True)
class MeasuredTap:
    """One tap of one sequence at one step: the engine's error, and the reference's own (`noise`).

    `largest` is the golden tensor's largest magnitude, on which single elements' errors are judged.
    """

    step: int
    seq: int
    tap: str
    engine: TapComparison
    noise: Metrics | None = None
    largest: float = math.nan


def measure(sides: Recordings) -> Iterator[MeasuredTap]:
    """All that the engine ran, in execution order: step, tap, sequence."""
    for side in filter(None, (sides.engine, sides.floor)):
        _same_ids(side, sides.golden, sides.engine.steps)
    absent = sides.engine.session.meta.absent | sides.golden.session.meta.absent
    lacking = _lacking(sides) if sides._known else frozenset()
    for step in sides.engine.steps:
        seqs = sorted(sides.engine.sequences(step))
        for tap in sides.golden.session.taps:
            for seq in seqs:
                place = step, seq, tap.name
                if tap.name in absent:
                    yield MeasuredTap(*place, TapComparison(None, absent[tap.name]))
                elif tap.name in lacking and place in sides._known:  # the golden tensor need not be read
                    nothing = compare(sides.engine, tap.name, step, seq, np.empty(0), sides.golden.dtype)
                    yield MeasuredTap(*place, nothing, *sides._known[place])
                else:
                    yield _measure_tap(sides, tap.name, step, seq)


def _lacking(sides: Recordings) -> frozenset[str]:
    """The taps of which the engine's recording has no tensor at all: a run without taps keeps little more than its
    logits."""
    captured = sides.engine.session.captured_taps(sides.engine.branch)
    return frozenset(tap.name for tap in sides.golden.session.taps) - captured


def _measure_tap(sides: Recordings, tap: str, step: int, seq: int) -> MeasuredTap:
    golden = sides.golden.session.rebuilt(tap, step=step, seq=seq)
    if (step, seq, tap) not in sides._known:
        sides._known[step, seq, tap] = _measure_reference(sides, tap, step, seq, golden)
    noise, largest = sides._known[step, seq, tap]
    assert golden.array is not None, "what the reference was measured by"
    engine = compare(sides.engine, tap, step, seq, golden.array, sides.golden.dtype, golden.slice)
    return MeasuredTap(step, seq, tap, engine, noise, largest)


def _measure_reference(
    sides: Recordings, tap: str, step: int, seq: int, golden: Rebuilt
) -> tuple[Metrics | None, float]:
    """The noise of a place, and the golden tensor's largest magnitude. DiagnosisError where that tensor is no use."""
    right = golden.array
    if right is None or np.isnan(right).any():
        wrong = "is missing" if right is None else "holds NaN"
        raise DiagnosisError(f"the golden {tap} {wrong} at step {step}: no reference to judge by")
    if golden.slice and step <= 1:  # what was cut must stand for the whole
        itself = compare(sides.golden, tap, step, seq, right, sides.golden.dtype, golden.slice).metrics
        if itself is None or not itself.equal:
            raise DiagnosisError(
                f"the golden {tap} differs from itself at step {step}: no reference to judge by"
            )
    noise = None
    if sides.floor is not None:
        noise = compare(sides.floor, tap, step, seq, right, sides.golden.dtype, golden.slice).metrics
    return noise, float(np.max(np.abs(right), initial=0.0, where=np.isfinite(right)))


def _same_ids(side: Recording, golden: Recording, steps: range) -> None:
    for step in steps:
        for name, recording in (("golden", golden), ("floor", side)):
            if step not in recording.steps:
                raise IdsMismatch(f"the {name} session lacks step {step}; record it for as many decode steps")
        theirs = golden.sequences(step)
        for seq, ours in side.sequences(step).items():
            if seq not in theirs or tuple(theirs[seq].ids) != tuple(ours.ids):
                read = list(theirs[seq].ids)[:8] if seq in theirs else "nothing"
                raise IdsMismatch(
                    f"step {step}, sequence {seq}: {side.session.path.name} read ids {list(ours.ids)[:8]}, "
                    f"the golden {read}; force both onto the same ids"
                )


@dataclass(frozen=True, slots=True)
class NoiseLimits:
    """The floors of the relative L2 error, and of the largest error of a single element over the golden
    tensor's largest magnitude."""

    whole: Floors
    single: Floors


def limits_of(dtype: str, measured: Sequence[MeasuredTap]) -> NoiseLimits:
    """From the noise at `dtype`; fixed tolerances where none was measured."""
    noise = {(m.step, m.seq, m.tap): m.noise.rel_l2 for m in measured if m.noise is not None}
    single = {
        (m.step, m.seq, m.tap): relative(m.noise.max_abs, m.largest) for m in measured if m.noise is not None
    }
    return NoiseLimits(Floors.measured(dtype, noise), Floors.measured(dtype, single))


#: Over the fixed tolerance of a dtype: by how much two libraries may differ and still be called right, both of them.
_APART = 30.0


def references_apart(sides: Recordings, measured: Sequence[MeasuredTap]) -> str | None:
    """Where two libraries disagree beyond noise, in words: then their difference is no floor. None where they do not,
    or are one."""
    if not sides.two_libraries or sides.floor is None:
        return None
    for place in measured:
        if place.noise is not None and not place.noise.rel_l2 <= _APART * ROUNDING[sides.floor.dtype]:
            names = [side.session.meta.source or "?" for side in (sides.golden, sides.floor)]
            return (
                f"{names[0]} and {names[1]} themselves disagree: {place.tap} at step {place.step} is "
                f"{place.noise.rel_l2:.2g} apart (relative); judged by fixed tolerances against {names[0]}"
            )
    return None


def relative(error: float, largest: float) -> float:
    return error / largest if largest > 0 else (math.inf if error else 0.0)
