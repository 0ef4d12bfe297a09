"""Commands that change the run: each forks a branch, so that what was stays beside what is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from engine.faults.catalogue import DEFAULTS, FAULTS, check_rules, faults_of
from engine.sampling import Sampling
from sessions.text import clean
from workbench.debugger import expressions, registry
from workbench.debugger.debugger import Checkpoint, Debugger
from workbench.debugger.errors import CommandError, DebuggerError, NeedsEngine
from workbench.debugger.motion import Goal, backward_to, forward, require_step
from workbench.debugger.patches import Bounds, Patch, cut
from workbench.debugger.reading import parts_of, select, whole_of
from workbench.debugger.registry import Argument, command
from workbench.debugger.timeline import Line
from workbench.debugger.values import Message, Position, Result, Stop, Table


@command(
    "toggle", "t", arguments=(
        Argument("rule", "rule", required=True), Argument("value", "word", required=True),
        Argument("keep_cache", "flag", help="leave the KV cache as the old rules made it"),
    ),
    group="changing", changes=True, engine=True, key="x",
    help="change a rule, on a new branch from here",
    details="By default the steps up to here are run again under the new rules, on the same tokens, so that the KV"
    " cache is consistent; --keep-cache leaves it as it is. `info toggles` lists the rules.",
)  # fmt: skip
def toggle(debugger: Debugger, rule: str, value: str, keep_cache: bool) -> Result:
    """Another rule."""
    if debugger.executor is None:
        return _recorded_fork(debugger, f"{rule}={value}")
    line = debugger.timeline.line(debugger.position.branch)
    rules = {
        name: known for name, known in {**line.rules, rule: value}.items() if DEFAULTS.get(name) != known
    }
    faults_of({rule: value})
    inferior = debugger.engine.inferior
    faults = check_rules(rules, inferior.model, inferior.config.tp)
    if keep_cache:
        for fault in {*faults} ^ {*faults_of(line.rules)}:
            if fault.level == "build":
                raise CommandError(
                    f"{fault.rule} changes the cache's shape: it cannot be kept (leave out --keep-cache)"
                )
        return _fork_here(debugger, f"{rule}={value}", rules=rules)
    return _fork_from_start(debugger, f"{rule}={value}", rules)


@command(
    "set", arguments=(
        Argument("what", "word", required=True, choices=("seed", "temperature", "top-k", "top-p")),
        Argument("value", "word", required=True),
    ),
    group="changing", changes=True, engine=True,
    help="change how tokens are chosen, on a new branch from here: seed, temperature, top-k, top-p",
)  # fmt: skip
def set_(debugger: Debugger, what: str, value: str) -> Result:
    """Another sampling."""
    if debugger.executor is None:
        return _recorded_fork(debugger, f"{what}={value}")
    line = debugger.timeline.line(debugger.position.branch)
    name = what.replace("-", "_")
    try:
        changed: int | float = int(value) if name in ("seed", "top_k") else float(value)
    except ValueError:
        raise CommandError(f"set {what}: {clean(value, limit=40)!r} is no number") from None
    sampling: dict[int, dict[str, Any]] = {}
    for seq, first in debugger.engine.inferior.first_sampling.items():
        sampling[seq] = {**line.sampling.get(seq, {}), name: changed}
        Sampling(**{**asdict(first), **sampling[seq]})  # raises for a value out of range
    return _fork_here(debugger, f"{what}={value}", sampling=sampling)


@command(
    "patch", arguments=(Argument("what", "text", required=True, help="TAP[index] = VALUE | golden"),),
    group="changing", changes=True, engine=True,
    help="overwrite part of a tensor in this step, on a new branch: patch TAP[index] = VALUE | golden",
    details="`patch layers.0.attn.q_proj[3, :8] = 0`, `patch layers.2.mlp.act = golden`. The step is run again with"
    " the patch; indices are those of the tensor that one rank alone would have had.",
)  # fmt: skip
def patch(debugger: Debugger, what: str) -> Result:
    """Another value."""
    tap, index, rest = expressions.parse_reference(what)
    if not rest.startswith("=") or not rest[1:].strip():
        raise CommandError("patch TAP[index] = VALUE, or = golden", what, len(what) - len(rest))
    at = require_step(debugger)
    wanted = rest[1:].strip()
    name = f"{tap}{expressions.show_index(index)}={wanted}"
    if debugger.executor is None:
        return _recorded_fork(debugger, name)
    place = debugger.timeline.places.exact(tap)
    debugger.engine.land()  # the step is run again anyway, and what has not passed yet can be patched too
    parts = parts_of(debugger, tap)
    whole, _ = whole_of(debugger, parts)
    bounds = _bounds(whole.shape, index, tap)
    target = tuple(slice(*b) for b in bounds)
    if wanted == "golden":
        values = golden_tensor(debugger, tap, whole.shape)[target]
    else:
        values = np.full(whole[target].shape, _value(wanted, what), np.float32)
    shapes = [parts.by_rank[rank].shape for rank in sorted(parts.by_rank)]
    layout = debugger.session.tap(tap).layout
    made = Patch(place, 0, at.step, cut(layout, shapes, bounds, values))
    line = debugger.timeline.line(at.branch)
    kept = [one for one in line.patches if one.step <= at.step]
    return _fork_at(debugger, name, at.step, patches=[*kept, made])


def golden_tensor(debugger: Debugger, tap: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The golden's tensor at this tap and step; an error where there is none or it does not fit."""
    from workbench.debugger.checking import golden_session

    at = debugger.position
    with golden_session(debugger) as golden:
        if at.step not in golden.steps(0) or not golden.has_tap(tap):
            raise DebuggerError(f"the golden has no {tap} at step {at.step}: `golden` records it up to here")
        ours = (
            debugger.timeline.sequence(at.branch, at.step)
            if at.step <= debugger.timeline.last(at.branch)
            else None
        )
        told = next(iter(golden.step(at.step, 0).sequences))
        if ours is not None and list(told.ids) != list(ours.ids):
            raise DebuggerError(f"the golden read other ids at step {at.step}: `golden` records it for these")
        found = golden.rebuilt(tap, step=at.step).array
    if found is None or found.shape != shape:
        raise DebuggerError(
            f"the golden's {tap} has shape {None if found is None else found.shape}, not {shape}"
        )
    return np.asarray(found)


@command(
    "branch", arguments=(Argument("name", "branch", help="a number or name; none: the present one"),),
    group="changing", changes=True, help="go to another branch, at this step if it has it",
)  # fmt: skip
def branch(debugger: Debugger, name: str | None) -> Result:
    """Switch."""
    if name is None:
        line = debugger.timeline.line(debugger.position.branch)
        return Message(f"branch {line.id} ({clean(line.name)})", {"branch": line.id})
    line = debugger.timeline.named(name)
    if debugger.live:
        debugger.engine.land()
    at = debugger.position
    last = debugger.timeline.last(line.id)
    return backward_to(debugger, Position(line.id, min(at.step, last), at.place if at.step <= last else None))


@command("branches", group="changing", help="every branch: where it forked, its rules, how far it went")
def branches(debugger: Debugger) -> Result:
    """The tree as a table."""
    rows = [
        [("→ " if line.id == debugger.position.branch else "") + str(line.id), clean(line.name), line.parent,
         line.fork_step if line.forked_at is None else line.forked_at, line.steps,
         " ".join(f"{k}={v}" for k, v in line.rules.items()) or "correct"]
        for line in debugger.timeline.lines.values()
    ]  # fmt: skip
    return Table("", ["branch", "name", "parent", "forked at", "steps", "rules"], rows)


@command(
    "checkpoint", arguments=(Argument("note", "text"),), group="changing", changes=True,
    help="remember this position for `restart`",
)  # fmt: skip
def checkpoint(debugger: Debugger, note: str | None) -> Result:
    """Remember."""
    made = Checkpoint(len(debugger.checkpoints) + 1, debugger.position, note or "")
    debugger.checkpoints.append(made)
    return Message(f"checkpoint {made.id} at {_place(debugger, made.position)}", {"id": made.id})


@command(
    "restart", arguments=(Argument("checkpoint", "int", help="none: the beginning"),), group="changing",
    changes=True, help="go back to a checkpoint, or to the beginning; starts a lost engine again",
)  # fmt: skip
def restart(debugger: Debugger, checkpoint: int | None) -> Result:
    """Back to a checkpoint."""
    found = next((one for one in debugger.checkpoints if one.id == checkpoint), None)
    if checkpoint is not None and found is None:
        raise CommandError(f"there is no checkpoint {checkpoint}: `info checkpoints` lists them")
    if debugger.lost and debugger.executor is not None:
        debugger.executor.inferior.restart()
        debugger.executor.forget()
        debugger.lost = ""
    target = found.position if found is not None else Position(debugger.position.branch, -1)
    last = debugger.timeline.last(target.branch)
    return backward_to(debugger, target if target.step <= last else Position(target.branch, last))


@command(
    "note", arguments=(Argument("text", "text", required=True),), group="session", changes=False,
    help="write a note into the session's journal",
)  # fmt: skip
def note(debugger: Debugger, text: str) -> Result:
    """A note at this step."""
    if debugger.executor is None:
        return Message("not noted: a replay only reads")
    debugger.journal("note", text)
    return Message(f"noted at step {max(debugger.position.step, 0)}")


def checkpoint_table(debugger: Debugger) -> Table:
    """What `info checkpoints` shows."""
    rows = [[one.id, _place(debugger, one.position), clean(one.note)] for one in debugger.checkpoints]
    return Table("", ["checkpoint", "where", "note"], rows, empty="no checkpoints: `checkpoint` makes one")


def _recorded_fork(debugger: Debugger, name: str) -> Stop:
    """In a replay: the branch that this very change made at this very step when the session was recorded."""
    at = debugger.position
    for line in debugger.timeline.lines.values():
        if line.parent == at.branch and line.forked_at == at.step and line.name == name:
            last = debugger.timeline.last(line.id)
            place = at.place if at.step <= last else None
            stop = backward_to(debugger, Position(line.id, min(at.step, last), place))
            return replace(stop, reason="goto")
    raise NeedsEngine(f"{name} was not tried here in this recording, and {registry.REPLAY_REASON}")


# --- forking -----------------------------------------------------------------------------------------


def _fork_from_start(debugger: Debugger, name: str, rules: Mapping[str, str]) -> Stop:
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
        debugger.check_interrupted()
        told = timeline.record(at.branch, step).sequences
        forced = {one.seq: one.emitted for one in told if one.emitted is not None}
        engine.start(made.id, {"stop": "never", "keep": False}, forced)
        debugger.position = Position(made.id, step)
    return _arrive(debugger, at)


def _fork_here(
    debugger: Debugger, name: str, rules: Mapping[str, str] | None = None,
    sampling: Mapping[int, dict[str, Any]] | None = None,
) -> Stop:  # fmt: skip
    """A branch that shares everything up to here; inside a step, the step is run again."""
    at = debugger.position
    fork_step = at.step if at.place is not None else at.step + 1
    return _fork_at(debugger, name, fork_step, rules=rules, sampling=sampling)


def _fork_at(
    debugger: Debugger, name: str, fork_step: int, rules: Mapping[str, str] | None = None,
    sampling: Mapping[int, dict[str, Any]] | None = None, patches: list[Patch] | None = None,
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
    sampling: dict[int, dict[str, Any]],
) -> Line:  # fmt: skip
    timeline, at = debugger.timeline, debugger.position
    inferior = debugger.engine.inferior
    writer, unused = inferior.writer, max(timeline.lines) + 1
    number = None
    if writer is not None:
        number = inferior.guard(
            lambda: writer.branch(name, parent=at.branch, fork_step=fork_step, rules=rules)
        )
    made = Line(
        unused if number is None else number, name, at.branch, fork_step, rules, list(patches), dict(sampling),
        steps=fork_step, forked_at=at.step,
    )  # fmt: skip
    timeline.lines[made.id] = made
    details = {
        "at": at.step, "patches": [one.to_json() for one in patches],
        "sampling": {str(seq): changes for seq, changes in sampling.items()},
    }  # fmt: skip
    debugger.journal("fork", name, Position(made.id, fork_step), details)
    return made


# --- patches -----------------------------------------------------------------------------------------


def _bounds(shape: tuple[int, ...], index: list[Any] | None, tap: str) -> Bounds:
    """`[3, :8]` as (start, stop) of every dimension."""
    whole = np.broadcast_to(np.zeros((), np.int8), shape)
    if select(whole, index, tap).size == 0:
        raise CommandError(f"{tap}{expressions.show_index(index)} is empty: shape {shape}")
    found = []
    for dim, size in enumerate(shape):
        one = index[dim] if index is not None and dim < len(index) else [None, None]
        if isinstance(one, int):
            start = one + size if one < 0 else one
            found.append((start, start + 1))
        else:
            start, stop, _ = slice(*one).indices(size)
            found.append((start, stop))
    return tuple(found)


def _value(text: str, line: str) -> float:
    tree = expressions.parse(text)
    sign = -1.0 if isinstance(tree, list) and tree[0] == "-" and len(tree) == 2 else 1.0
    number = tree[1] if sign < 0 else tree
    special = {("name", "nan"): float("nan"), ("name", "inf"): float("inf")}
    if isinstance(number, list):
        number = special.get(
            (number[0], number[1]) if len(number) == 2 and isinstance(number[1], str) else ("", "")
        )
    if not isinstance(number, float):
        raise CommandError("a patch wants a number, nan, inf, or golden", line, max(line.find(text), 0))
    return sign * number


def _place(debugger: Debugger, at: Position) -> str:
    tap = "" if at.place is None else f", {debugger.timeline.places.names[at.place]}"
    return f"branch {at.branch}, step {at.step}{tap}"


def toggles_table(debugger: Debugger) -> Table:
    """What `info toggles` shows: every rule, what it is now, what it could be, what that costs."""
    rules = debugger.timeline.line(debugger.position.branch).rules
    inferior = debugger.executor.inferior if debugger.executor is not None else None
    rows = []
    for fault in FAULTS:
        reason = fault.acts_on(inferior.model, inferior.config.tp) if inferior else registry.REPLAY_REASON
        now = rules.get(fault.rule, DEFAULTS[fault.rule])
        rows.append([fault.rule, fault.value, now, now == fault.value, fault.level, fault.title, reason])
    return Table("", ["rule", "value", "now", "on", "level", "what it does", "greyed"], rows)
