"""Tensors on demand: from the session, from the step in flight, or by running the step again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.ranks.messages import ReadWeight
from lockstep.engine.ranks.wire import widen
from lockstep.sessions import LayoutError, layouts
from lockstep.sessions.records import STATISTICS, TensorRecord
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.motion import require_step
from lockstep.workbench.debugger.errors import CommandError, NotCaptured

_RANK = re.compile(r"\brank\s+(\d+)\s*$")


@dataclass(frozen=True, slots=True)
class Parts:
    """What each rank held of a tap. `part`: the slice of the whole that was kept ("" = whole)."""

    tap: str
    step: int
    by_rank: Mapping[int, NDArray[Any]]
    part: str
    source: str  # "session" | "live" | "re-executed"


def parts_of(
    debugger: Debugger,
    tap: str,
    *,
    seq: int | None = None,
    step: int | None = None,
    branch: int | None = None,
    whole: bool = True,
) -> Parts:
    """Each rank's tensor at a tap of a step (default: the present one) of a branch and a sequence (default: the
    chosen one), widened to float32 where it was bfloat16.

    A live debugger runs the step again for what was not captured, and adds it to the session. With `whole` false
    a part that was captured will do. NotCaptured states how to have it next time.
    """
    at = require_step(debugger)
    step = at.step if step is None else step
    branch = at.branch if branch is None else branch
    seq = debugger.sequence if seq is None else seq
    place = debugger.timeline.places.exact(tap)
    flight = debugger.flight
    if flight is not None and (flight.branch, flight.step) == (branch, step):
        if place > flight.stopped.place:
            raise _not_passed(debugger, place, step)
        found = debugger.engine.read(place, seq)
        if found is not None:
            return Parts(tap, step, found, "", "live")
        debugger.engine.land()
    if step > debugger.timeline.last(branch):
        raise CommandError(f"step {step} of branch {branch} was not run yet")
    recorded = _recorded(debugger, tap, step, seq, branch, whole)
    if recorded is not None:
        return recorded
    if not debugger.live:
        part = _recorded(debugger, tap, step, seq, branch, False)
        if part is not None:
            return part
        raise NotCaptured(
            f"{tap} of step {step} was not captured: record the run with `--capture '{tap}'` (or `--capture full`), "
            f"or `print {tap}` in the live run"
        )
    again = debugger.engine.recapture(branch, step, [place])
    tensors = [one for one in again.tensors if one.tap == tap and one.seq == seq and not one.slice]
    return Parts(tap, step, _widened(tensors), "", "re-executed")


def whole_of(debugger: Debugger, parts: Parts) -> tuple[NDArray[Any], str]:
    """The tensor that one rank alone would have had, and what there is to report about it."""
    if debugger.timeline.session is None:
        raise NotCaptured("nothing is recorded: ask for one rank's part (`rank 0`)")
    layout = debugger.session.tap(parts.tap).layout
    try:
        rebuilt = layouts.rebuild(layout, parts.by_rank, debugger.timeline.ranks)
    except LayoutError as error:
        raise CommandError(
            f"{parts.tap} cannot be rebuilt from its ranks: {error}; ask for `rank 0`"
        ) from error
    if rebuilt.array is None:
        raise NotCaptured(f"{parts.tap} cannot be rebuilt: {rebuilt.note}")
    note = "; ".join(
        n for n in (rebuilt.note, f"only [{parts.part}] was captured" if parts.part else "") if n
    )
    return rebuilt.array, note


def check_rank(debugger: Debugger, rank: int) -> None:
    """CommandError where there is no such rank."""
    if not 0 <= rank < debugger.timeline.ranks:
        raise CommandError(f"there is no rank {rank}: ranks are 0 to {debugger.timeline.ranks - 1}")


def rank_of(debugger: Debugger, text: str) -> tuple[str, int | None]:
    """A text and the rank of a trailing `rank R`, None where there is no such end."""
    match = _RANK.search(text)
    if match is None:
        return text.strip(), None
    check_rank(debugger, int(match[1]))
    return text[: match.start()].strip(), int(match[1])


def select(array: NDArray[Any], index: list[Any] | None, what: str) -> NDArray[Any]:
    """The part of an array that `[0, 2:8]` names."""
    if index is None:
        return array
    if len(index) > array.ndim:
        raise CommandError(f"{what} has {array.ndim} dimensions, the index {len(index)}")
    for dim, one in enumerate(index):
        if isinstance(one, int) and not -array.shape[dim] <= one < array.shape[dim]:
            raise CommandError(
                f"index {one} is out of range: dimension {dim} of {what} has {array.shape[dim]}"
            )
    chosen = tuple(one if isinstance(one, int) else slice(*one) for one in index)
    return np.asarray(array[chosen])


def statistics_at(debugger: Debugger, place: int) -> list[list[float]]:
    """Each rank's statistics of a tap of the present step."""
    at = require_step(debugger)
    flight = debugger.flight
    if flight is not None and at.step == flight.step:
        stopped = flight.stopped
        if place > stopped.place:
            raise _not_passed(debugger, place, at.step)
        if place == stopped.place:  # measured there with statistics off, too
            return [[float(names[name]) for name in STATISTICS] for names in stopped.names]
        stats = stopped.stats
    else:
        stats = debugger.timeline.stats(at.branch, at.step)
    if stats is None:
        raise NotCaptured("statistics were not recorded: run with `--capture stats`")
    return [[float(value) for value in row] for row in stats[place]]


def weight_of(debugger: Debugger, name: str) -> dict[int, NDArray[Any]]:
    """Each rank's share of a parameter, by its checkpoint name. Live only."""
    reports = debugger.engine.inferior.client.call(ReadWeight(name))
    return {rank: report.value.numbers for rank, report in enumerate(reports)}


def _not_passed(debugger: Debugger, place: int, step: int) -> CommandError:
    tap = debugger.timeline.places.names[place]
    return CommandError(f"{tap} has not passed yet in step {step}: `until {tap}` runs to it")


def _recorded(debugger: Debugger, tap: str, step: int, seq: int, branch: int, whole: bool) -> Parts | None:
    timeline = debugger.timeline
    if timeline.session is None or step > timeline.last(branch):
        return None
    timeline.session.refresh()
    if step not in timeline.session.steps(branch):
        return None
    kept = timeline.session.parts(tap, step=step, seq=seq, branch=branch, slice="" if whole else None)
    if len(kept) < timeline.ranks:
        return None
    part = next(iter(kept.values())).slice
    return Parts(tap, step, _widened(list(kept.values())), part, "session")


def _widened(tensors: list[TensorRecord]) -> dict[int, NDArray[Any]]:
    return {one.rank: widen(one.array, one.dtype) for one in tensors}
