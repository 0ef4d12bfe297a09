"""capture: what further steps leave behind, beside what they do already; this step is run again for it."""

from __future__ import annotations

from lockstep.engine.taps.names import matches
from lockstep.workbench.debugger.answers import Message
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.registry import REPLAY_REASON, Argument, command
from lockstep.workbench.models.capture import parse_capture


@command(
    "capture", arguments=(Argument("what", "text", help="globs of taps, or stats, last, full, off; none: show"),),
    group="changing", changes=True, engine=True,
    help="record the whole tensors of these taps too, in this step and in those to come",
    details="`capture layers.*.attn.k_cache` adds to what is recorded; `capture stats` goes back to statistics and the"
    " attention, as far as a step's budget has room for it. The present step is run again, so that it has the tensors"
    " as well; inside a step those that have passed are read, and it goes on from where it stands.",
)  # fmt: skip
def capture(debugger: Debugger, what: str | None) -> Message:
    """Another capture policy."""
    if debugger.executor is None:  # no error: a script that captured something is replayed all the same
        return Message(f"nothing is captured: {REPLAY_REASON}")
    engine = debugger.engine
    inferior = engine.inferior
    words = (what or "").split()
    globs = [word for word in words if any(matches(spec.name, [word]) for spec in inferior.specs)]
    again = 0
    if words:
        kept = inferior.capture.full if globs == words else ()
        wanted = parse_capture([*kept, *words], inferior.specs)
        inside = debugger.flight is not None and wanted.statistics == inferior.capture.statistics
        if not inside:
            engine.land()
        inferior.watch(wanted)
        again = _passed(debugger, globs) if inside else _again(debugger, globs)
    now = inferior.capture
    reported = ["statistics"] * now.statistics + [f"whole: {' '.join(now.full)}"] * bool(now.full)
    within = "" if now.budget_bytes is None else f" within {now.budget_bytes >> 20} MiB"
    reported += [f"{' '.join(now.last)}{within}"] * bool(now.last)
    step = debugger.position.step if debugger.flight is None else debugger.flight.step
    added = f"; {again} taps of step {step} added" if again else ""
    return Message(f"every step records {', '.join(reported) or 'nothing'}{added}", {"full": list(now.full)})


def _passed(debugger: Debugger, globs: list[str]) -> int:
    """Read what has passed by now in the step that stands still; how many taps. The rest of it comes by itself."""
    engine, flight = debugger.engine, debugger.flight
    assert flight is not None
    debugger.session.refresh()
    there = {key.tap for key in debugger.session.captured(flight.step, flight.branch) if not key.slice}
    names = debugger.timeline.places.names[: flight.stopped.place + 1]
    places = [i for i, name in enumerate(names) if name not in there and matches(name, globs)]
    return len(
        {
            place
            for place in places
            for seq in engine.inferior.sequences
            if engine.read(place, seq) is not None
        }
    )


def _again(debugger: Debugger, globs: list[str]) -> int:
    """Run the present step again for the tensors that it lacks; how many taps."""
    at, timeline = debugger.position, debugger.timeline
    if not 0 <= at.step <= timeline.last(at.branch):
        return 0
    debugger.session.refresh()
    there = {key.tap for key in debugger.session.captured(at.step, at.branch) if not key.slice}
    places = [i for i, name in enumerate(timeline.places.names) if name not in there and matches(name, globs)]
    if places:
        debugger.engine.recapture(at.branch, at.step, places)
    return len(places)
