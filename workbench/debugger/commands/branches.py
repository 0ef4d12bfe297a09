"""Commands that go from branch to branch, and back to where one has been."""

from __future__ import annotations

from lockstep.sessions.text import clean
from lockstep.workbench.debugger.answers import Message, Position, Result, TableResult
from lockstep.workbench.debugger.core.backwards import backward_to, land
from lockstep.workbench.debugger.core.comparing import run_ahead
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.registry import Argument, command
from lockstep.workbench.debugger.core.settings import Checkpoint
from lockstep.workbench.debugger.errors import CommandError
from lockstep.workbench.views.branches import engine_name


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
    land(debugger)
    at = debugger.position
    last = debugger.timeline.last(line.id)
    return backward_to(debugger, Position(line.id, min(at.step, last), at.place if at.step <= last else None))


@command(
    "extend", arguments=(
        Argument("name", "branch", required=True, help="a number or name"),
        Argument("count", "int", default=1, help="how many tokens"),
    ),
    group="running", changes=True, engine=True, help="run a branch on from its end, and stay here",
    details="Nothing stops it but the end of its text. The split view steps both of its sides with it.",
)  # fmt: skip
def extend(debugger: Debugger, name: str, count: int) -> Message:
    """Run ahead elsewhere."""
    timeline, line = debugger.timeline, debugger.timeline.named(name)
    debugger.engine.land()
    at, before = debugger.position, timeline.last(line.id)
    try:
        stop = run_ahead(debugger, line.id, before + max(1, count))
    finally:
        debugger.engine.land()
        debugger.position = at
    last, why = timeline.last(line.id), "" if stop is None else f"{stop.description}: "
    reported = f"ran on to step {last}" if last > before else f"ends at step {last}"
    return Message(
        f"{why}branch {line.id} ({clean(line.name)}) {reported}", {"branch": line.id, "step": last}
    )


@command("branches", group="changing", help="every branch: where it forked, its faults, how far it went")
def branches(debugger: Debugger) -> Result:
    """The tree as a table."""
    engine = engine_name(debugger.session) or "none"
    rows = [
        [("→ " if line.id == debugger.position.branch else "") + str(line.id), clean(line.name), line.parent,
         line.fork_step if line.forked_at is None else line.forked_at, line.steps,
         " ".join(f"{k}={v}" for k, v in line.rules.items()) or engine]
        for line in debugger.timeline.lines.values()
    ]  # fmt: skip
    return TableResult("", ["branch", "name", "parent", "forked at", "steps", "faults"], rows)


@command(
    "checkpoint", arguments=(Argument("note", "text"),), group="changing", changes=True,
    help="remember this position for `restart`",
)  # fmt: skip
def checkpoint(debugger: Debugger, note: str | None) -> Result:
    """Remember."""
    made = Checkpoint(len(debugger.checkpoints) + 1, debugger.position, note or "")
    debugger.checkpoints.append(made)
    return Message(
        f"checkpoint {made.id} at {debugger.timeline.places.describe(made.position)}", {"id": made.id}
    )


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
