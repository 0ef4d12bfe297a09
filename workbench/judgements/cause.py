"""What explains a difference from the reference, and how it is reported: in the session, JSON, panes and reports
alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from lockstep.sessions.records import JSON
from lockstep.workbench.judgements.remedies import remedy_of
from lockstep.workbench.judgements.reproduction import Reproduction

#: The class of a cause that has no name: what is known is where it is, and what it is not.
UNNAMED = "unknown"
#: What is reported where nothing is known.
NO_CAUSE = "no known cause fits"


class Cause(msgspec.Struct, frozen=True):
    """A cause of wrong numbers: what was computed instead of what should have been, and where.

    `name` is stable, `kind` (in the file `class`) its class ("rope", "mask", …; "unknown": no hypothesis fits), `fault`
    the catalogue's name of it ("mask=additive"), where it has one. `tap` is where it shows first; `place` is all of it
    in words. `layers`, `ranks`, `heads` and `steps` are those that are wrong; no `heads`: all of them, or there are
    none. `transform` holds the fitted parameters; `residual` is the share of the error's norm that it leaves: 0
    explains everything, 1 nothing. `confidence` is the share of answers like this one that are right
    (docs/diagnosis.md). `evidence` is what speaks for it, `ruled_out` which other hypotheses were tried and what they
    leave. `follows` is what comes of it: wrong as well, for no reason of its own. `alternative`: it explains the same
    difference as well as the cause before it does. `reproduction`: what became of the reference with it; None: that was
    not asked.
    """

    name: str = ""
    text: str = ""
    transform: JSON = None
    residual: float | None = None
    kind: str = msgspec.field(default="", name="class")
    fault: str | None = None
    tap: str = ""
    place: str = ""
    layers: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    confidence: float | None = None
    evidence: tuple[str, ...] = ()
    ruled_out: tuple[str, ...] = ()
    alternative: bool = False
    follows: tuple[str, ...] = ()
    reproduction: Reproduction | None = None

    def in_words(self) -> str:
        """The cause in one line, with what it leaves of the error where that is worth a word."""
        where = f"{self.place}: " if self.place else ""
        left = "" if self.residual is None or not self.residual >= 1e-4 else _left(self.residual)
        return f"{where}{self.text}{left}"


def _left(residual: float) -> str:
    return f" (leaves {100 * residual:.2g} % of the error)"


def cause_lines(cause: Cause) -> Iterator[tuple[str, str]]:
    """All that is known of a cause, as (label, words)."""
    yield "or" if cause.alternative else "cause", cause.in_words()
    if isinstance(cause.transform, dict):
        fitted = [f"{key} {_value(value)}" for key, value in cause.transform.items() if value not in ([], {})]
        if fitted:
            yield "fitted", ", ".join(fitted)
    if cause.confidence is not None and math.isfinite(cause.confidence):
        yield "confidence", f"{cause.confidence:.2f}"
    if cause.reproduction is not None:
        yield "proof", cause.reproduction.in_words()
    for evidence in cause.evidence:
        yield "evidence", evidence
    if cause.follows:
        yield "follows", "; ".join(cause.follows)
    if cause.ruled_out:
        yield "ruled out", "; ".join(cause.ruled_out).replace("_", " ")  # names of hypotheses, as words
    remedy = remedy_of(cause.name, cause.kind)
    if remedy.fix:
        yield "fix", remedy.fix
    if remedy.issues:
        yield "seen in", ", ".join(remedy.issues)
    if cause.fault is not None:
        yield "catalogue", f"{cause.fault} (`lockstep faults`)"


def _value(value: JSON) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        shown = ", ".join(map(_value, value[:8]))
        return f"[{shown}{', …' if len(value) > 8 else ''}]"
    if isinstance(value, dict):
        shown = ", ".join(f"{key}: {_value(one)}" for key, one in list(value.items())[:8])
        return f"{{{shown}{', …' if len(value) > 8 else ''}}}"
    return str(value)


def numbers_in_words(numbers: Sequence[int]) -> str:
    """Sorted numbers with runs drawn together: "0–3, 7"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}–{b}" for a, b in runs)
