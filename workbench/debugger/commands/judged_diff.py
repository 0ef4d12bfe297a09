"""A recording and its golden reference side by side: each tap judged against its noise, not bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lockstep.sessions import Session
from lockstep.workbench.checking.recorded_run import checkpoint_of, supported
from lockstep.workbench.debugger.answers import JsonObject, TableResult
from lockstep.workbench.diagnosis.diagnose import diagnose
from lockstep.workbench.diagnosis.judgement import DiagnosisError, Judgement, TapVerdict
from lockstep.workbench.diagnosis.measure import Recordings
from lockstep.workbench.diagnosis.naming import named
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.reconcile import agreed
from lockstep.workbench.diagnosis.verdict import judge
from lockstep.workbench.judgements.cause import Cause
from lockstep.workbench.judgements.coverage import Coverage, coverage
from lockstep.workbench.judgements.golden_event import plain
from lockstep.workbench.words.plain_text import plural

#: Who writes golden references, and what they compute in.
_REFERENCES = {"transformers": ("float64",), "llama.cpp": ("float32", "float64")}

_COLUMNS = ["tap", "verdict", "first step", "steps", "max abs", "rel l2", "over noise", "note"]


ComparisonVerdict = Literal["match", "diverged", "inconclusive"]


@dataclass(frozen=True)
class ComparisonTable(TableResult):
    """Two runs compared: what came of it, and what that rests on (of runs of ours None)."""

    verdict: ComparisonVerdict = "match"
    coverage: Coverage | None = None

    def _text(self) -> str:
        rests = [] if self.coverage is None else [self.coverage.in_words(), *self.coverage.remarks()]
        return "\n".join([*rests, super()._text()])

    def to_json(self) -> JsonObject:
        """As a table's, with the coverage as it is everywhere."""
        reported = super(ComparisonTable, replace(self, coverage=None)).to_json()
        return {**reported, "coverage": plain(self.coverage)}


def golden_of(a: Session, b: Session) -> Session | None:
    """Which of the two is the golden reference of the other; None where neither or both are one."""
    first, second = (_is_reference(one) for one in (a, b))
    return None if first == second else a if first else b


def _is_reference(session: Session) -> bool:
    return session.meta.foreign is None and session.meta.config.dtype in _REFERENCES.get(
        session.meta.source, ()
    )


def judged_diff(engine: Session, branch: int, golden: Session) -> ComparisonTable:
    """Every tap that is not right, the first on top, and why.

    DiagnosisError or IdsMismatch where the two cannot be compared.
    """
    facts, lacking = _facts(engine)
    judgement, causes = judge(Recordings.of(engine, golden, branch=branch), facts), list[Cause]()
    if facts is not None:
        found = diagnose(engine, facts, golden=golden, branch=branch)
        judgement, found = agreed(judgement, found)
        causes = named(found, engine, golden, judgement.first_divergence, facts, branch)
    elif judgement.verdict == "diverged":
        judgement = replace(judgement, notes=(*judgement.notes, f"no cause is looked for: {lacking}"))
    rests = None
    if engine.meta.foreign is not None:
        rests = coverage(engine, golden, branch=branch)
        judgement = supported(judgement, rests)
        causes = causes if judgement.verdict == "diverged" else []
    rows = list(_rows(judgement))
    title = f"{judgement.verdict}: {len(rows)} of {plural(len({one.tap for one in judgement.taps}), 'tap')} not right"
    if rests is not None and judgement.verdict == "inconclusive" and (rests.misplaced or rests.lacking):
        title = f"inconclusive: {rests.misplaced or rests.lacking}"
    title = "\n".join([title, *(f"cause: {cause.in_words()}" for cause in causes), *judgement.notes])
    empty = "every tap is within its noise" if judgement.verdict == "match" else "none is called right"
    return ComparisonTable(title, _COLUMNS, rows, empty, judgement.verdict, rests)


def _facts(engine: Session) -> tuple[Facts | None, str]:
    """Of the recording's checkpoint; or what is needed to find it."""
    try:
        return Facts.of(checkpoint_of(engine), engine.meta.config.dtype or "float32"), ""
    except DiagnosisError as error:
        return None, str(error)


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
