"""Checks: the golden reference, branches and sessions against each other, where an error began."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sessions import Session, SessionError
from sessions.text import clean
from workbench.debugger.debugger import Debugger
from workbench.debugger.errors import DebuggerError, NotCaptured
from workbench.debugger.motion import backward_to, land
from workbench.debugger.origins import find_origin, stand_at
from workbench.debugger.registry import Argument, command
from workbench.debugger.values import Result, Table, jsonable


@dataclass(frozen=True)
class Golden(Result):
    """What the golden reference said of a branch."""

    verdict: str  # "match" | "diverged"
    steps: int
    first: str  # the first divergence in words, "" for none
    golden_session: str
    data: Any
    kind: ClassVar[str] = "golden"

    def to_text(self) -> str:
        head = f"golden: {self.verdict} over {self.steps} steps"
        return f"{head}; first divergence {self.first}" if self.first else head

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "verdict": self.verdict, "steps": self.steps, "first": self.first or None,
            "golden_session": self.golden_session, **jsonable(self.data),
        }  # fmt: skip


@command(
    "origin", "o", arguments=(Argument("tap", "tap", help="default: the present one, or the last wrong one"),),
    group="checking", changes=True,
    help="walk back to the first operation whose inputs were clean, and go there",
    details="Follows NaN and inf, and what `golden` has failed, back along the data flow and through the KV cache.",
)  # fmt: skip
def origin(debugger: Debugger, tap: str | None) -> Result:
    """The beginning of a chain of wrong operations."""
    found = find_origin(debugger, tap)
    backward_to(debugger, stand_at(debugger, found))
    return found


@command("check", group="checking", help="what `golden` found, a layer a row")
def check(debugger: Debugger) -> Result:
    """The verdicts of the branch, by step and layer."""
    debugger.session.refresh()
    verdicts = debugger.session.verdicts(branch=debugger.position.branch)
    layers: dict[tuple[int, str], dict[str, int]] = {}
    for one in verdicts:
        layer = ".".join(one.tap.split(".")[:2]) if one.tap.startswith("layers.") else one.tap
        counts = layers.setdefault((one.step, layer), {"pass": 0, "suspect": 0, "fail": 0, "absent": 0})
        counts[one.verdict] += 1
    rows = [[step, layer, *counts.values()] for (step, layer), counts in layers.items()]
    columns = ["step", "layer", "pass", "suspect", "fail", "absent"]
    return Table("", columns, rows, empty="nothing was judged yet: `golden` does")


@command(
    "diff", arguments=(
        Argument("a", "word", required=True, help="a branch, or a session file"),
        Argument("b", "word", required=True, help="a branch, a session file, or golden"),
    ),
    group="checking", help="two branches, two sessions, or one and its golden, tap by tap",
)  # fmt: skip
def diff(debugger: Debugger, a: str, b: str) -> Result:
    """What differs, and the first of it."""
    land(debugger)
    with _side(debugger, a) as first, _side(debugger, b) as second:
        return compare_sessions(*first, *second)


def compare_sessions(a: Session, branch_a: int, b: Session, branch_b: int) -> Table:
    """Taps that differ, in execution order; where the tokens part, the steps before are compared."""
    from sessions.diff import diff as compare

    steps = _common_steps(a, branch_a, b, branch_b)
    found = compare(a, b, branch_a=branch_a, branch_b=branch_b, steps=steps)
    rows = []
    equal = 0
    for one in found:
        if one.equal:
            equal += 1
            continue
        rows.append([
            one.step, one.tap.name, one.rank if one.rank is not None else "all",
            None if one.metrics is None else one.metrics.max_abs,
            None if one.metrics is None else one.metrics.rel_l2, one.note or None,
        ])  # fmt: skip
    title = f"{len(rows)} taps differ, {equal} are equal, over {len(steps)} steps on the same tokens"
    return Table(title, ["step", "tap", "rank", "max abs", "rel l2", "note"], rows, empty="no difference")


def _common_steps(a: Session, branch_a: int, b: Session, branch_b: int) -> list[int]:
    """The steps that both have, as long as they read the same ids."""
    steps = []
    for step in range(min(a.steps(branch_a).stop, b.steps(branch_b).stop)):
        ids = [
            {told.seq: list(told.ids) for told in session.step(step, branch).sequences}
            for session, branch in ((a, branch_a), (b, branch_b))
        ]
        shared = ids[0].keys() & ids[1].keys()
        if not shared or any(ids[0][seq] != ids[1][seq] for seq in shared):
            break
        steps.append(step)
    if not steps:
        raise DebuggerError(
            "the two read different tokens from the first step on: no diff of them means anything"
        )
    return steps


@contextmanager
def _side(debugger: Debugger, name: str) -> Iterator[tuple[Session, int]]:
    """A session and a branch of it, by what the user called it."""
    if name == "golden":
        with golden_session(debugger) as golden:
            yield golden, 0
    elif name.isdigit() or any(line.name == name for line in debugger.timeline.lines.values()):
        debugger.session.refresh()
        yield debugger.session, debugger.timeline.named(name).id
    else:
        path = Path(name)
        if path.suffix != ".session":
            raise DebuggerError(f"{clean(name, limit=80)!r} is neither a branch nor a .session file")
        with Session.open(path) as session:
            yield session, 0


@contextmanager
def golden_session(debugger: Debugger) -> Iterator[Session]:
    """The golden session in use."""
    path = debugger.settings.golden
    if path is None:
        raise NotCaptured("there is no golden reference: `golden` records one (it needs the model)")
    try:
        session = Session.open(Path(path))
    except SessionError as error:
        raise DebuggerError(f"the golden reference is gone: {error}") from error
    with session:
        yield session
