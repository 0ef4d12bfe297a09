"""Where something wrong came from: back along the data flow to the first operation whose inputs were clean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lockstep.engine.taps.flow import UnknownTap, inputs_of, is_known, remembers
from lockstep.engine.taps.names import count_layers
from lockstep.sessions.records import STATISTICS
from lockstep.workbench.debugger.answers import Position, Result
from lockstep.workbench.debugger.core.backwards import land
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.motion import require_step
from lockstep.workbench.debugger.errors import DebuggerError, NotCaptured
from lockstep.workbench.views.statistics import counted
from lockstep.workbench.views.verdicts import verdicts_at

_NAN, _INF = STATISTICS.index("nan"), STATISTICS.index("inf")


@dataclass(frozen=True)
class Origin(Result):
    """The first operation of a chain of wrong ones: its output is wrong and its inputs are not."""

    tap: str
    step: int
    ranks: tuple[int, ...]
    what: str  # "NaN" | "inf" | "golden"
    count: int  # non-finite elements over all ranks
    path: tuple[str, ...]  # everything wrong on the way back, the last first
    inputs: tuple[str, ...]
    kind: ClassVar[str] = "origin"

    def _text(self) -> str:
        ranks = f"rank {', '.join(map(str, self.ranks))}"
        clean = f"its inputs ({', '.join(self.inputs)}) are clean" if self.inputs else "it has no inputs"
        head = f"{self.tap} at step {self.step} is the first: {clean}"
        amount = f"{self.count} × {self.what}" if self.count else self.what
        return f"{head}\n{amount} on {ranks}; found by walking back over {len(self.path)} operations"


def find_origin(debugger: Debugger, tap: str | None) -> Origin:
    """Walk back from a tap of the present step (default: the present one if it is wrong, else all that are)."""
    at = require_step(debugger)
    land(debugger)
    search = _Search(debugger, at.branch)
    names = debugger.timeline.places.names
    if tap is not None:
        debugger.timeline.places.exact(tap)
        if not search.dirty(tap, at.step):
            raise DebuggerError(
                f"{tap} at step {at.step} holds neither NaN nor inf, and no verdict finds it wrong"
            )
        return search.back([tap], at.step)
    if at.place is not None and search.dirty(names[at.place], at.step):
        return search.back([names[at.place]], at.step)
    wrong = [name for name in names if search.dirty(name, at.step)]
    if not wrong:
        raise DebuggerError(f"nothing at step {at.step} is wrong as far as was recorded: there is no origin")
    return search.back([name for name in wrong if is_known(name)] or wrong, at.step)


class _Search:
    """What is wrong at which tap: non-finite elements, and where `golden` has judged, what it failed."""

    def __init__(self, debugger: Debugger, branch: int) -> None:
        self.debugger, self.branch = debugger, branch
        timeline = debugger.timeline
        self.places = {name: place for place, name in enumerate(timeline.places.names)}
        self.layers = count_layers(self.places)
        self._failed: dict[int, set[str]] = {}  # by step, as it is asked for
        if timeline.session is not None:
            timeline.session.refresh()

    def failed(self, tap: str, step: int) -> bool:
        """Whether `golden` has failed the tap at a step."""
        session = self.debugger.timeline.session
        if step not in self._failed and session is not None:
            verdicts = verdicts_at(session, self.branch, step)
            self._failed[step] = {one.tap for one in verdicts if one.verdict == "fail"}
        return tap in self._failed.get(step, ())

    def non_finite(self, tap: str, step: int) -> tuple[tuple[int, ...], int, str]:
        """Ranks that hold NaN or inf there, how many, and which of the two."""
        stats = self.debugger.timeline.stats(self.branch, step)
        if stats is None:
            raise NotCaptured("origin needs statistics: run with `--capture stats`")
        rows = stats[self.places[tap]]
        bad = rows[:, _NAN] + rows[:, _INF]
        ranks = tuple(rank for rank, value in enumerate(bad) if value > 0)
        what = "NaN" if rows[:, _NAN].sum() > 0 else "inf"
        return ranks, counted(bad[list(ranks)]), what

    def dirty(self, tap: str, step: int) -> bool:
        """Whether a tap is wrong at a step."""
        return bool(self.non_finite(tap, step)[0]) or self.failed(tap, step)

    def inputs(self, tap: str) -> list[str]:
        """The taps of this model that a tap is computed from."""
        try:
            return [name for name in inputs_of(tap, self.layers, self.places) if name in self.places]
        except UnknownTap as error:
            raise DebuggerError(str(error)) from error

    def back(self, taps: list[str], step: int) -> Origin:
        """From wrong taps back over everything wrong that they are computed from; of the operations whose own
        inputs are clean, the first that ran."""
        seen = {(step, tap) for tap in taps}
        waiting, origins = list(seen), []
        while waiting:
            at, name = waiting.pop()
            before = [(at, one) for one in self.inputs(name) if self.dirty(one, at)]
            if not before and remembers(name):
                before = self._earlier(name, at)
            if not before:
                origins.append((at, name))
            waiting += [one for one in before if one not in seen]
            seen.update(before)
        step, tap = min(origins, key=lambda one: (one[0], self.places[one[1]]))
        path = [name for _, name in sorted(seen, key=lambda one: (one[0], self.places[one[1]]), reverse=True)]
        ranks, count, what = self.non_finite(tap, step)
        if not ranks:
            ranks, what = tuple(range(self.debugger.timeline.ranks)), "differs from golden"
        return Origin(tap, step, ranks, what, count, tuple(path), tuple(self.inputs(tap)))

    def _earlier(self, tap: str, step: int) -> list[tuple[int, str]]:
        """A cache whose newest rows are clean got its wrong ones in an earlier step: the first that left it so."""
        return next(([(k, tap)] for k in range(step) if self.dirty(tap, k)), [])


def stand_at(debugger: Debugger, origin: Origin) -> Position:
    """Where the debugger stands when it has gone to an origin."""
    return Position(debugger.position.branch, origin.step, debugger.timeline.places.exact(origin.tap))
