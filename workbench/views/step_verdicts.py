"""The verdicts of one step as a map: which operation of which layer left the golden reference, how far."""

from __future__ import annotations

from dataclasses import dataclass

from engine.taps.names import local_name
from sessions.text import clean
from workbench.views.source import SessionSource
from workbench.views.verdicts import Judged, causes, first_failed, verdicts_at
from workbench.views.where import Where


@dataclass(frozen=True, slots=True)
class GoldenTap:
    """One judged tap: its place in the map, and all that the judge said, as (name, value) pairs."""

    tap: int
    name: str
    judged: Judged
    details: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """The judged taps of a step in execution order, by tap index; the first that failed; the steps of the branch
    that have verdicts; what is known to cause its first divergence, best first."""

    step: int
    taps: dict[int, GoldenTap]
    first: GoldenTap | None
    judged_steps: tuple[int, ...]
    causes: tuple[str, ...] = ()


def judged_step(source: SessionSource, where: Where) -> JudgedStep:
    """The verdicts at `where`."""
    session = source.session
    taps: dict[int, GoldenTap] = {}
    for verdict in verdicts_at(session, where.branch, where.step):
        if session.has_tap(verdict.tap):
            tap, name = session.tap(verdict.tap).index, clean(verdict.tap, limit=120)
            taps[tap] = GoldenTap(tap, name, Judged.of(verdict), details(verdict.detail))
    first = first_failed([tap.judged for tap in taps.values()])
    return JudgedStep(
        where.step,
        taps,
        next((tap for tap in taps.values() if tap.judged is first), None),
        tuple(sorted({verdict.step for verdict in session.verdicts(branch=where.branch)})),
        tuple(cause.in_words() for cause in causes(session, where.branch)),
    )


def details(detail: object) -> tuple[tuple[str, str], ...]:
    """A verdict's detail as short (name, value) pairs, nested ones with a dot between."""
    if not isinstance(detail, dict):
        return () if detail is None else (("", clean(str(detail), limit=120)),)
    found: list[tuple[str, str]] = []
    for key, value in list(detail.items())[:40]:
        name = clean(str(key), limit=30)
        if isinstance(value, dict):
            found += [(f"{name}.{inner}", text) for inner, text in details(value)]
        else:
            text = f"{value:.3g}" if isinstance(value, float) else clean(str(value), limit=120)
            found.append((name, text))
    return tuple(found)


def operations_of(taps: tuple[str, ...]) -> tuple[str, ...]:
    """The rows of the map: each operation of a layer once, those outside the layers in their places."""
    return tuple(dict.fromkeys(local_name(name) for name in taps))
