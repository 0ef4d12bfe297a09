"""Forks: a new branch from where the debugger stands, brought to that very place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lockstep.engine.faults.catalogue import DEFAULTS
from lockstep.engine.taps.breaks import PauseSpec
from lockstep.workbench.debugger.answers import Position, Stop
from lockstep.workbench.debugger.core import registry
from lockstep.workbench.debugger.core.backwards import backward_to
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.fork_event import ForkEvent, SamplingChange
from lockstep.workbench.debugger.core.goal import Goal
from lockstep.workbench.debugger.core.motion import forward
from lockstep.workbench.debugger.core.timeline import Timeline, TimelineBranch
from lockstep.workbench.debugger.errors import NeedsEngine
from lockstep.workbench.debugger.events import StepEvent
from lockstep.workbench.inferior.patches import Patch


@dataclass(frozen=True, slots=True)
class Switched:
    """Where a rule was switched: on branch `origin`, at the end of `step`."""

    origin: int
    step: int


def switched_at(timeline: Timeline, line: TimelineBranch, rule: str, value: str) -> Switched | None:
    """Where `line`, or a branch that it comes from by toggles alone, left `value` of a rule; None where it has it, and
    where nothing that it comes from had it."""
    child = line
    while child.parent is not None and child.rules.get(rule, DEFAULTS.get(rule)) != value:
        parent = timeline.line(child.parent)
        if child.rules == parent.rules:
            return None  # patched, or sampled otherwise: going back would lose that
        if parent.rules.get(rule, DEFAULTS.get(rule)) == value:
            return Switched(parent.id, child.fork_step - 1 if child.forked_at is None else child.forked_at)
        child = parent
    return None


def recorded_branch(debugger: Debugger, name: str) -> TimelineBranch | None:
    """The branch that this very change made at this very step when the session was recorded."""
    at = debugger.position
    for line in debugger.timeline.lines.values():
        if line.parent == at.branch and line.forked_at == at.step and line.name == name:
            return line
    return None


def recorded_fork(debugger: Debugger, name: str) -> Stop:
    """In a replay: go to `recorded_branch`."""
    at, line = debugger.position, recorded_branch(debugger, name)
    if line is None:
        raise NeedsEngine(f"{name} was not tried here in this recording, and {registry.REPLAY_REASON}")
    last = debugger.timeline.last(line.id)
    place = at.place if at.step <= last else None
    stop = backward_to(debugger, Position(line.id, min(at.step, last), place))
    return replace(stop, reason="goto")


def fork_from_start(debugger: Debugger, name: str, rules: Mapping[str, str]) -> Stop:
    """A branch whose steps up to here are run again under other rules, on the same tokens."""
    engine, timeline = debugger.engine, debugger.timeline
    engine.land()
    at = debugger.position
    old = timeline.line(at.branch)
    made = _new_line(
        debugger, name, fork_step=0, rules=dict(rules), patches=old.patches, sampling=old.sampling
    )
    again = at.step if at.place is not None else at.step + 1
    debugger.position = Position(made.id, -1)
    for step in range(again):
        if debugger.interrupts.wanted:
            return debugger.stop("pause", f"interrupted: the branch has {step} of {again} steps run again")
        reported = timeline.record(at.branch, step).sequences
        forced = {one.seq: one.emitted for one in reported if one.emitted is not None}
        engine.start(made.id, PauseSpec(keep=False), forced)
        debugger.position = Position(made.id, step)
        debugger.events(StepEvent(made.id, step))
    return _arrive(debugger, at)


def fork_here(
    debugger: Debugger, name: str, rules: Mapping[str, str] | None = None,
    sampling: Mapping[int, SamplingChange] | None = None,
) -> Stop:  # fmt: skip
    """A branch that shares everything up to here; inside a step, the step is run again."""
    at = debugger.position
    fork_step = at.step if at.place is not None else at.step + 1
    return fork_at(debugger, name, fork_step, rules=rules, sampling=sampling)


def fork_at(
    debugger: Debugger, name: str, fork_step: int, rules: Mapping[str, str] | None = None,
    sampling: Mapping[int, SamplingChange] | None = None, patches: list[Patch] | None = None,
) -> Stop:  # fmt: skip
    """A branch that shares the steps before `fork_step`; then go to where the debugger stood."""
    debugger.engine.land()
    at = debugger.position
    old = debugger.timeline.line(at.branch)
    made = _new_line(
        debugger, name, fork_step=fork_step, rules=dict(old.rules if rules is None else rules),
        patches=old.patches if patches is None else patches,
        sampling=old.sampling if sampling is None else dict(sampling),
    )  # fmt: skip
    debugger.position = Position(made.id, fork_step - 1)
    return _arrive(debugger, at)


def _arrive(debugger: Debugger, at: Position) -> Stop:
    """Stand on the new branch where the debugger stood on the old one."""
    here = debugger.position
    if at.place is not None:
        return forward(debugger, Goal("place", at.place, quiet=True, reason="goto"))
    if here.step < at.step:
        return forward(debugger, Goal(last=at.step, quiet=True, reason="goto"))
    return debugger.stop("goto", f"branch {here.branch}")


def _new_line(
    debugger: Debugger, name: str, *, fork_step: int, rules: dict[str, str], patches: list[Patch],
    sampling: dict[int, SamplingChange],
) -> TimelineBranch:  # fmt: skip
    timeline, at = debugger.timeline, debugger.position
    inferior = debugger.engine.inferior
    unused = max(timeline.lines) + 1  # the number that the session will give it, where it cannot yet
    number = inferior.recorder.write(
        lambda writer: writer.branch(name, parent=at.branch, fork_step=fork_step, rules=rules)
    )
    made = TimelineBranch(
        unused if number is None else number, name, at.branch, fork_step, rules, list(patches), dict(sampling),
        steps=fork_step, forked_at=at.step,
    )  # fmt: skip
    timeline.lines[made.id] = made
    fork = ForkEvent(at.step, [one.to_json() for one in patches], sampling)
    debugger.journal("fork", name, Position(made.id, fork_step), fork.to_json())
    return made
