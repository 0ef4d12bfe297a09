"""A session's verdicts as JUnit cases: a suite for each branch and step, a test for each tap."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.sessions import Session
from lockstep.workbench.export.junit import JUnitCase, Result
from lockstep.workbench.export.plots import judged_text
from lockstep.workbench.views.verdicts import Judged, State, judged_of

_RESULTS: dict[State, Result] = {
    "pass": "pass",
    "suspect": "suspect",
    "fail": "fail",
    "inherited": "fail",
    "absent": "absent",
}


def cases(session: Session, branch: int | None = None, step: int | None = None) -> Iterator[JUnitCase]:
    """What is missing or damaged of the session, as a failure; then the verdicts by branch, step, execution."""
    for number, loss in enumerate(session.losses):
        yield JUnitCase("session", session.path.name, f"loss {number}", "fail", loss, "")
    names = {line.id: line.name for line in session.branches()}
    for one in judged_of(session, branch, step):
        group = "model" if one.layer is None else f"layers.{one.layer}"
        suite = f"{names.get(one.branch, one.branch)}, step {one.step}"
        message = one.reason if one.state in ("absent", "fail") and one.reason else judged_text(one)
        yield JUnitCase(suite, group, one.operation, _RESULTS[one.state], message, _detail(one))


def _detail(one: Judged) -> str:
    figures = {
        "relative L2 error": one.rel_l2,
        "noise floor": one.floor,
        "times the floor": one.ratio,
        "relative L2 error on golden inputs": one.injected,
        "max abs": one.max_abs,
        "cosine": one.cosine,
    }
    lines = [f"{name}: {value:.6g}" for name, value in figures.items() if value is not None]
    if one.state == "inherited":
        lines.insert(0, "inherited: what it is computed from had failed already")
    return "\n".join([*lines, *([one.reason] if one.reason else [])])
