"""What was judged: the golden verdict and its causes, a layer a row, where an error began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sessions.text import clean
from workbench.debugger.answers import Result, Table, counted, jsonable
from workbench.debugger.core.backwards import backward_to
from workbench.debugger.core.debugger import Debugger
from workbench.debugger.core.origins import find_origin, stand_at
from workbench.debugger.core.registry import Argument, Key, command


@dataclass(frozen=True)
class Golden(Result):
    """What the golden reference said of a branch."""

    verdict: str  # "match" | "diverged"
    steps: int
    first: str  # the first divergence in words, "" for none
    golden_session: str
    data: Any
    kind: ClassVar[str] = "golden"

    def _text(self) -> str:
        head = f"golden: {self.verdict} over {counted(self.steps, 'step')}"
        if not self.first:
            return head
        ledger = clean(str(self.data.get("ledger") or ""), limit=800)
        told = [f"{head}; first divergence {self.first}", ledger, f"cause: {causes_in_words(self.data)[0]}"]
        return "\n".join(filter(None, told))

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "verdict": self.verdict, "steps": self.steps, "first": self.first or None,
            "golden_session": self.golden_session, **jsonable(self.data),
        }  # fmt: skip


@dataclass(frozen=True)
class Diagnosis(Result):
    """The causes that explain the first divergence, best first."""

    verdict: str
    first: str
    causes: Sequence[str]
    data: Sequence[Any]  # each cause as the signatures told it: name, text, fitted, residual
    kind: ClassVar[str] = "diagnosis"

    def _text(self) -> str:
        if self.verdict == "match":
            return "nothing to explain: the branch matches its golden reference"
        return "\n".join(
            [self.first, *(f"{'or' if i else 'cause'}: {one}" for i, one in enumerate(self.causes))]
        )


def last_judgement(debugger: Debugger) -> dict[str, Any] | None:
    """What `golden` found on this branch last, None where it was never asked."""
    if debugger.position.branch in debugger.judged:
        return debugger.judged[debugger.position.branch]
    debugger.session.refresh()
    found = debugger.session.events(branch=debugger.position.branch, kind="golden")
    data: Any = found[-1].data if found else None
    if not isinstance(data, dict) or data.get("verdict") not in ("match", "diverged"):
        return None
    causes = data.get("causes")
    known = [one for one in causes if isinstance(one, dict)] if isinstance(causes, list) else []
    steps = data.get("steps")
    return data | {"causes": known, "steps": steps if isinstance(steps, int) else 0}


def causes_in_words(data: Mapping[str, Any]) -> list[str]:
    """The causes of a judgement, best first, each with what it leaves of the error."""
    return [_cause(one) for one in data["causes"]] or ["no known signature fits"]


def _cause(one: Mapping[str, Any]) -> str:
    left, words = one.get("residual"), clean(str(one.get("text")), limit=400)
    if not isinstance(left, int | float) or left < 1e-4:
        return words
    return f"{words} (leaves {100 * left:.2g} % of the error)"


@command(
    "diagnose", group="checking", changes=True,
    help="name the cause of the first divergence from the golden reference",
    details="Fits known transforms (a missing bias, a permuted row, a factor, one rank's part, …) to what the engine"
    " and the reference hold at the first wrong operation. Asks `golden` first where the branch was not judged.",
)  # fmt: skip
def diagnose(debugger: Debugger) -> Result:
    """The causes."""
    data = last_judgement(debugger)
    if data is None or (data["verdict"] == "match" and data["steps"] <= debugger.position.step):
        with debugger.quietly():
            debugger.execute("golden")
        data = last_judgement(debugger)
    assert data is not None, "`golden` leaves a judgement or raises"
    verdict, first = str(data["verdict"]), clean(str(data.get("words", "")))
    return Diagnosis(verdict, first, causes_in_words(data) if first else [], data["causes"])


@command(
    "origin", "o", arguments=(Argument("tap", "tap", help="default: the present one, or the last wrong one"),),
    group="checking", changes=True, key=Key("o", "walk back to where it went wrong"),
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
        if one.verdict in counts:
            counts[one.verdict] += 1
    rows = [[step, layer, *counts.values()] for (step, layer), counts in layers.items()]
    columns = ["step", "layer", "pass", "suspect", "fail", "absent"]
    return Table("", columns, rows, empty="nothing was judged yet: `golden` does")
