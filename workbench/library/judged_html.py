"""A judgement in a notebook: the first wrong operation, the causes and the ledger."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup

from lockstep.workbench.export.check_text import explanation
from lockstep.workbench.judgements.cause import Cause, cause_lines
from lockstep.workbench.judgements.golden_event import GoldenEvent
from lockstep.workbench.library import html


def judged(event: GoldenEvent, conclusion: str = "", more: Iterable[tuple[str, str]] = ()) -> list[Markup]:
    """The parts of it; `conclusion` is reported in place of the bare verdict, `more` lines stand with the first."""
    parts = [html.heading(f"verdict: {conclusion or event.verdict}", event.verdict)]
    reported = [
        (label, words) for label, words in explanation(event) if label in ("first wrong", "how wrong")
    ]
    reported += [("note", note) for note in event.remarks]
    reported += more
    parts += [html.lines(reported)] if reported else []
    if event.causes:
        parts.append(
            html.table(("cause", "confidence", "fix"), [_cause_row(cause) for cause in event.causes])
        )
    if event.faulty:
        rows = [(one.tap, one.step, one.seq, one.injected, one.ratio) for one in event.faulty]
        columns = ("tap", "step", "sequence", "own error (relative L2)", "over noise")
        parts.append(html.table(columns, rows, "ledger: the operations that are wrong by themselves"))
    return parts


def _cause_row(cause: Cause) -> tuple[object, ...]:
    reported = dict(cause_lines(cause))
    return reported.get("cause") or reported.get("or"), reported.get("confidence"), reported.get("fix")
