"""What is always on screen: what runs, where it stands, and its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.taps.names import count_layers
from lockstep.sessions.errors import SessionDamaged
from lockstep.sessions.meta import is_companion
from lockstep.sessions.records import SequenceStep, StepInFlight, StepRecord
from lockstep.sessions.state import State, foreign_log, state_of
from lockstep.sessions.text import clean
from lockstep.workbench.judgements.golden_event import GoldenEvent, last_golden_event
from lockstep.workbench.views.branches import BranchLine, branch_lines, engine_name
from lockstep.workbench.views.candidates import emitted_probability
from lockstep.workbench.views.identity import device_name, dtype_name, file_name, model_name
from lockstep.workbench.views.sentinels import NAMES, alarm
from lockstep.workbench.views.sequences import Sequences
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.verdicts import first_failed, judged_at, worst_verdict
from lockstep.workbench.views.where import Where


@dataclass(frozen=True, slots=True)
class Overview:
    """The session as a whole; changes only when it grows."""

    name: str
    model: str
    ranks: int
    engine: str  # the other engine that was recorded, "" for ours
    device: str
    dtype: str
    block_size: int
    taps: tuple[str, ...]
    layouts: tuple[str, ...]
    layers: int
    branches: tuple[BranchLine, ...]
    batch: Sequences  # of all branches
    state: State
    losses: tuple[str, ...]  # what is missing or damaged, or not the session's, each in a sentence
    absent: Mapping[str, str]  # why the recorder has not a tap

    @property
    def operations(self) -> list[tuple[int, str]]:
        """The taps that are operations of the model, each with its index: all but those that describe another's
        rows."""
        return [(index, name) for index, name in enumerate(self.taps) if not is_companion(name)]

    @property
    def lost(self) -> str:
        """The first loss, and how many more there are; "" for none."""
        if len(self.losses) < 2:
            return "".join(self.losses)
        return f"{self.losses[0]} {len(self.losses) - 1} more: `lockstep sessions verify`."

    def branch(self, branch: int) -> BranchLine:
        """The branch of that id."""
        return next(line for line in self.branches if line.id == branch)

    def tap(self, name: str | None) -> int | None:
        """The index of the tap of that name; None where there is none."""
        return self.taps.index(name) if name in self.taps else None


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is wrong in a step: in a word or two, with where it begins, and with ranks and reason as well."""

    name: str
    where: str
    whole: str


@dataclass(frozen=True, slots=True)
class Present:
    """The present step."""

    steps: range
    phase: str
    position: int | None
    tokens_per_second: float | None
    emitted: str | None
    probability: float | None
    entropy: float | None
    verdict: str | None  # the worst of this step; None: nothing judged
    first_wrong: str | None
    inconclusive: bool = False  # nothing is wrong, and the run as a whole carries no verdict
    stopped_at: str = ""  # the tap at which the step stands still, "" where it is over
    absent: str = ""  # why the step did not feed the chosen sequence
    damage: str = ""  # why nothing else is known of it
    alarm: Alarm | None = None  # the gravest thing wrong in the step
    judgement: GoldenEvent | None = None  # the newest of the branch, which may be of other steps


def overview(source: SessionSource) -> Overview:
    """What the session is."""
    session = source.session
    names = tuple(clean(tap.name, limit=120) for tap in session.taps)
    return Overview(
        name=file_name(session),
        model=model_name(session),
        ranks=session.ranks,
        engine=engine_name(session),
        device=device_name(session),
        dtype=dtype_name(session),
        block_size=session.meta.config.block_size or 16,
        taps=names,
        layouts=tuple(clean(tap.layout, limit=60) for tap in session.taps),
        layers=count_layers(names),
        branches=branch_lines(session),
        batch=Sequences.of(session.meta.sequences, *(source.batch(one.id).fed for one in session.branches())),
        state=state_of(session),
        losses=tuple(session.losses or filter(None, [foreign_log(session)])),
        absent={clean(tap, limit=120): clean(why, limit=200) for tap, why in session.meta.absent.items()},
    )


def present(source: SessionSource, where: Where) -> Present | None:
    """The present step of a branch; None while it has none."""
    steps = source.reach(where.branch)
    if where.step not in steps:
        return None
    flight = source.under_way(where.branch, where.step)
    if flight is not None:
        return _under_way(source, where, flight)
    try:
        record = source.record(where.step, where.branch)
    except SessionDamaged as error:
        return Present(steps, "", None, None, None, None, None, None, None, damage=str(error))
    sequence = source.sequence(where.step, where.branch, where.seq)
    judged = judged_at(source.session, where.branch, where.step)
    wrong = first_failed(judged)
    emitted = sequence.emitted if sequence else None
    event = last_golden_event(source.session, where.branch)
    return Present(
        steps=steps,
        phase=record.phase,
        position=sequence.positions[-1] if sequence and len(sequence.positions) else None,
        tokens_per_second=1 / record.wall_seconds
        if record.wall_seconds > 0 and record.phase == "decode"
        else None,
        emitted=source.texts.label(emitted) if emitted is not None else None,
        probability=emitted_probability(sequence),
        entropy=sequence.entropy if sequence else None,
        verdict=worst_verdict(judged),
        first_wrong=wrong.tap if wrong else None,
        inconclusive=bool(judged) and wrong is None and event is not None and event.verdict == "inconclusive",
        absent="" if sequence is not None else source.batch(where.branch).why_absent(where.seq, where.step),
        alarm=_recorded_alarm(source, where, record),
        judgement=event,
    )


def _recorded_alarm(source: SessionSource, where: Where, record: StepRecord) -> Alarm | None:
    try:
        stats = source.stats(where.step, where.branch)
        checksums = source.session.checksums(where.step, where.branch)
    except SessionDamaged:  # the panes state what is damaged
        stats = checksums = None
    return _alarm(source, where.step, stats, checksums, record.sequences)


def _alarm(
    source: SessionSource,
    step: int,
    stats: NDArray[np.float32] | None,
    checksums: NDArray[np.uint64] | None,
    sequences: Sequence[SequenceStep] = (),
) -> Alarm | None:
    found = alarm(source.session, stats, checksums, sequences)
    if found is None:
        return None
    kind, one = found
    name = NAMES[kind]
    if one.tap is None:
        return Alarm(name, name, f"{name}: {one.words}")
    ranks = " ".join(map(str, one.ranks))
    at = clean(source.session.taps[one.tap].name, limit=120)
    where = f"{name} in step {step}, from {at} on"
    return Alarm(
        name, where, f"{where}{f', rank {ranks}' if ranks else ''}{f': {one.why}' if one.why else ''}"
    )


def _under_way(source: SessionSource, where: Where, flight: StepInFlight) -> Present:
    sequence = source.sequence(where.step, where.branch, where.seq)
    return Present(
        steps=source.reach(where.branch),
        phase="under way",
        position=sequence.positions[-1] if sequence and len(sequence.positions) else None,
        tokens_per_second=None,
        emitted=None,
        probability=None,
        entropy=None,
        verdict=None,
        first_wrong=None,
        absent="" if sequence is not None else source.batch(where.branch).why_absent(where.seq, where.step),
        alarm=_alarm(source, where.step, flight.stats, flight.checksums),
        stopped_at=clean(source.session.taps[flight.place].name, limit=120),
    )
