"""A recording and its golden reference side by side: each tap judged against its noise, not bit by bit."""

from __future__ import annotations

from contextlib import suppress

from sessions import Session
from workbench.checking.naming import named
from workbench.checking.recorded_run import checkpoint_of
from workbench.debugger.answers import TableResult
from workbench.diagnosis.diagnose import diagnose
from workbench.diagnosis.judgement import DiagnosisError, Judgement, TapVerdict
from workbench.diagnosis.operations.facts import Facts
from workbench.diagnosis.reconcile import reconciled
from workbench.diagnosis.verdict import judge
from workbench.views.causes import Cause
from workbench.views.plain_text import plural

#: Who writes golden references, and what they compute in.
_REFERENCES = {"transformers": ("float64",), "llama.cpp": ("float32", "float64")}

_COLUMNS = ["tap", "verdict", "first step", "steps", "max abs", "rel l2", "over noise", "note"]


def golden_of(a: Session, b: Session) -> Session | None:
    """Which of the two is the golden reference of the other; None where neither or both are one."""
    first, second = (_is_reference(one) for one in (a, b))
    return None if first == second else a if first else b


def _is_reference(session: Session) -> bool:
    return session.meta.config.dtype in _REFERENCES.get(session.meta.source, ())


def judged_diff(engine: Session, branch: int, golden: Session) -> tuple[TableResult, bool]:
    """Every tap that is not right, the first on top, and why; and whether any is wrong.

    DiagnosisError or IdsMismatch where the two cannot be compared.
    """
    judgement, causes = judge(engine, golden, branch=branch), list[Cause]()
    with suppress(DiagnosisError):  # without its checkpoint the reference alone tells
        checkpoint = checkpoint_of(engine)
        facts = Facts.of(checkpoint, engine.meta.config.dtype or "float32")
        found = diagnose(engine, facts, golden=golden, branch=branch)
        judgement = reconciled(judgement, found)
        causes = named(found, engine, golden, judgement.first_divergence, checkpoint)
    rows = list(_rows(judgement))
    title = f"{judgement.verdict}: {len(rows)} of {plural(len({one.tap for one in judgement.taps}), 'tap')} not right"
    title = "\n".join([title, *(f"cause: {cause.in_words()}" for cause in causes), *judgement.notes])
    table = TableResult(title, _COLUMNS, rows, empty="every tap is within its noise")
    return table, judgement.verdict == "diverged"


def _rows(judgement: Judgement) -> list[list[object]]:
    taps: dict[str, list[TapVerdict]] = {}
    for one in judgement.taps:
        if one.verdict in ("fail", "suspect"):
            taps.setdefault(one.tap, []).append(one)
    return [_row(tap, found) for tap, found in taps.items()]


def _row(tap: str, found: list[TapVerdict]) -> list[object]:
    worst = next((one for one in found if one.verdict == "fail" and not one.inherited), None)
    worst = worst or next((one for one in found if one.verdict == "fail"), found[0])
    word = "inherited" if worst.inherited else worst.verdict
    steps = {one.step for one in found}
    return [
        tap, word, min(steps), len(steps), worst.max_abs, worst.rel_l2, worst.ratio, worst.reason or None,
    ]  # fmt: skip
