"""What `lockstep.check` and `lockstep.diagnose` return."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from lockstep.sessions.records import JSON
from lockstep.sessions.text import clean
from lockstep.workbench.checking.pipeline import CheckResult
from lockstep.workbench.diagnosis.judgement import TapVerdict
from lockstep.workbench.export.check_text import conclusion, explain, explanation, rests, verdict
from lockstep.workbench.judgements.cause import Cause
from lockstep.workbench.judgements.coverage import Coverage
from lockstep.workbench.judgements.golden_event import Divergence, Faulty, GoldenEvent
from lockstep.workbench.library import html
from lockstep.workbench.library.judged_html import judged

#: Columns of the text.
_WIDTH = 100


@dataclass(frozen=True, slots=True, repr=False)
class Verdict:
    """A run judged against a reference. True exactly where it matches: `assert lockstep.check(model, tp=2)`.

    `str` of it is the report without the table of taps, `repr` a line of that. Of a model `model` is the name,
    `subject` what of it was run, `place` the file that the run was to be recorded in; `warnings` are what the verdict
    may suffer from.
    """

    result: CheckResult
    model: str = ""
    subject: str = ""
    place: Path | None = None
    warnings: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.matches

    @property
    def event(self) -> GoldenEvent:
        """All that was found but the taps, as a session keeps it."""
        return self.result.event

    @property
    def verdict(self) -> Literal["match", "diverged", "inconclusive"]:
        """ "match", "diverged", or "inconclusive": neither can be stated, `str` shows why."""
        return self.event.verdict

    @property
    def matches(self) -> bool:
        """Whether the run does what the reference does."""
        return self.event.matches

    @property
    def first_divergence(self) -> Divergence | None:
        """The first operation that went wrong: tap, layer, step, ranks, errors."""
        return self.event.first_divergence

    @property
    def causes(self) -> tuple[Cause, ...]:
        """What was computed instead of what should have been, best first."""
        return self.event.causes

    @property
    def ledger(self) -> tuple[Faulty, ...]:
        """Every operation that is wrong by itself: given right inputs, its output differs."""
        return self.event.faulty or ()

    @property
    def taps(self) -> tuple[TapVerdict, ...]:
        """The judgement of every tap of every sequence at every step, with its metrics."""
        return self.result.judgement.taps

    @property
    def tokens_identical(self) -> bool | None:
        """Whether both would have emitted the same tokens; None where not all could be compared."""
        return self.event.tokens_identical

    @property
    def coverage(self) -> Coverage | None:
        """What the verdict on a recording rests on; None for a model."""
        return self.event.coverage

    @property
    def session(self) -> Path | None:
        """The recording of the run, for `lockstep.open`; None where it was lost, and `lost` shows why."""
        return None if self.result.lost else self.result.engine_session

    @property
    def golden(self) -> Path | None:
        """The recording of the reference; None where there is none."""
        return self.result.golden_session

    @property
    def lost(self) -> str:
        """Why the run, or what was found, could not be recorded; "" where it was."""
        return self.result.lost

    def to_json(self) -> dict[str, JSON]:
        """Plain values: what `--json` prints."""
        return self.result.to_json()

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(
            file=out, width=_WIDTH, color_system=None, force_terminal=False, force_jupyter=False, highlight=False,
            soft_wrap=True,
        )  # fmt: skip
        if self.subject:
            console.print(clean(self.subject), markup=False)
        rests(self.event, console)
        explain(self.event, console)
        verdict(self.event, self.taps, console)
        return "\n".join([out.getvalue().rstrip(), *(clean(f"warning     {one}") for one in self.warnings)])

    def __repr__(self) -> str:
        # One line, and what matters at both ends: a test runner that shows a failed assertion cuts its middle.
        reported = dict(reversed(list(explanation(self.event))))
        order = ("first wrong", "how wrong", "ledger", "cause", "fix")
        parts = [f"{label}: {reported[label]}" for label in order if label in reported]
        return f"<Verdict {'; '.join([conclusion(self.event, self.taps), *parts])}>"

    def _repr_html_(self) -> str:
        subject = [html.paragraph(self.subject)] if self.subject else []
        more = [("warning", one) for one in self.warnings]
        more += [("session", str(self.session))] if self.session is not None else []
        return html.block(*subject, *judged(self.event, conclusion(self.event, self.taps), more))
