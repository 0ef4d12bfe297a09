"""The verdicts of one step as a map: which operation of which layer left the golden reference, how far."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.engine.taps.names import local_name
from lockstep.sessions import Session
from lockstep.sessions.text import clean
from lockstep.workbench.judgements.golden_event import last_golden_event
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.verdicts import Judged, causes, first_failed, judged_of, verdicts_at
from lockstep.workbench.views.where import Where
from lockstep.workbench.words.numbers import times
from lockstep.workbench.words.plain_text import figure_of


@dataclass(frozen=True, slots=True)
class GoldenTap:
    """One judged tap: its place in the map, and all that the judge reported, as (words, value) pairs."""

    tap: int
    name: str
    judged: Judged
    details: tuple[tuple[str, float | str], ...]


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """The judged taps of a step in execution order, by tap index; the first that failed; the steps of the branch
    that have verdicts; what is known to cause its first divergence, best first, and what came of the first of these in
    the reference (`proof`); what the judgement of the branch noted, and whether it could decide nothing
    ("inconclusive"). `divergence` is the step and the tap of the first wrong operation of the whole branch."""

    step: int
    taps: dict[int, GoldenTap]
    first: GoldenTap | None
    judged_steps: tuple[int, ...]
    causes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    inconclusive: bool = False
    proof: str = ""
    divergence: tuple[int, int] | None = None


def judged_step(source: SessionSource, where: Where) -> JudgedStep:
    """The verdicts at `where`."""
    session = source.session
    taps: dict[int, GoldenTap] = {}
    for verdict in verdicts_at(session, where.branch, where.step):
        if session.has_tap(verdict.tap):
            tap, name = session.tap(verdict.tap).index, clean(verdict.tap, limit=120)
            taps[tap] = GoldenTap(tap, name, Judged.of(verdict), details(verdict.detail))
    first = first_failed([tap.judged for tap in taps.values()])
    event = last_golden_event(session, where.branch)
    known = causes(session, where.branch)
    proved = known[0].reproduction if known else None
    judged = judged_of(session, where.branch)
    return JudgedStep(
        where.step,
        taps,
        next((tap for tap in taps.values() if tap.judged is first), None),
        tuple(sorted({one.step for one in judged})),
        tuple(cause.in_words() for cause in known),
        () if event is None else tuple(event.remarks),
        event is not None and event.verdict == "inconclusive",
        "" if proved is None else clean(proved.in_words(), limit=300),
        _place(session, first_failed(judged)),
    )


def _place(session: Session, wrong: Judged | None) -> tuple[int, int] | None:
    """Step and tap of an operation that is wrong by itself; None of one that inherited an error."""
    if wrong is None or wrong.inherited or not session.has_tap(wrong.tap):
        return None
    return wrong.step, session.tap(wrong.tap).index


#: What a verdict's figures are called.
_WORDS = {
    "seq": "sequence",
    "max_abs": "largest difference",
    "rel_l2": "relative L2 error",
    "cosine": "cosine similarity",
    "floor": "noise floor",
    "ratio": "error ÷ noise floor",
    "injected": "error on golden inputs",
    "injected_ratio": "that ÷ noise floor",
}
#: Of these, how many times one is larger than another; and how a reason ends that states only the first of them.
_RATIOS = ("ratio", "injected_ratio")
_OF_THE_RATIO = " times the noise floor"


def details(detail: object) -> tuple[tuple[str, float | str], ...]:
    """A verdict's detail as (words, value) pairs, nested ones with a dot between. What was not taken is left out."""
    if not isinstance(detail, dict):
        return () if detail is None else (("", clean(str(detail), limit=120)),)
    found: list[tuple[str, float | str]] = []
    for key, value in list(detail.items())[:40]:
        name = _WORDS.get(key) or clean(str(key), limit=30)
        if isinstance(value, dict):
            found += [(f"{name}.{inner}", text) for inner, text in details(value)]
        elif key == "inherited":
            found.append(("inputs", "wrong already" if value is True else "right"))
        elif key == "reason" and str(value).endswith(_OF_THE_RATIO):
            continue  # the ratio stands beside it
        elif value is not None:
            figure = figure_of(detail, key) if isinstance(value, float) or key in _WORDS else None
            if key in _RATIOS and figure is not None:
                found.append((name, times(figure)))
            else:
                found.append(
                    (name, clean(str(value), limit=120) if figure is None or key == "seq" else figure)
                )
    return tuple(found)


def operations_of(taps: tuple[str, ...]) -> tuple[str, ...]:
    """The rows of the map: each operation of a layer once, those outside the layers in their places."""
    return tuple(dict.fromkeys(local_name(name) for name in taps))
