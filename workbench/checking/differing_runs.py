"""Runs of the same tokens that differ in one respect, as evidence: which of them agree narrows down what is wrong.

They need no reference and fit nothing. A run on one rank that gives the same wrong numbers as one on two shows that
nothing is cut, given out or summed wrongly over ranks, whatever the numbers look like.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from lockstep.workbench.checking.invariants.invariant import Invariant
from lockstep.workbench.judgements.cause import Cause
from lockstep.workbench.judgements.golden_event import GoldenEvent


def with_runs(event: GoldenEvent, found: Sequence[Invariant]) -> GoldenEvent:
    """The judgement with what agrees and what does not, and with that as evidence for or against its causes."""
    tried = [one for one in found if one.result != "not tried"]
    agree = [one.name for one in tried if one.result == "holds"]
    notes = [f"runs that agree: {'; '.join(agree)}"] if agree else []
    notes += [
        f"runs that do not agree: {one.name} ({one.summary}): {one.means}"
        for one in tried
        if one.result == "broken"
    ]
    causes = tuple(_with_evidence(cause, tried, event.tp) for cause in event.causes)
    return replace(event, causes=causes, notes=(*event.notes, *notes))


def _with_evidence(cause: Cause, tried: Sequence[Invariant], tp: int) -> Cause:
    reported = [words for one in tried if (words := _speaks(cause, one, tp))]
    return replace(cause, evidence=(*cause.evidence, *reported))


def _speaks(cause: Cause, one: Invariant, tp: int) -> str:
    """What two runs show of a cause; "" for nothing."""
    broken_by = _breaks(cause, one.name, tp)
    if one.result == "holds":
        return f"against it: {one.name} holds, but {broken_by}" if broken_by else ""
    if broken_by:
        return f"{one.name} is broken, as it must be: {broken_by}"
    return f"{one.name} is broken there first" if one.tap and one.tap == cause.tap else ""


def _breaks(cause: Cause, name: str, tp: int) -> str:
    """Why a cause must make the two runs differ; "" where it need not."""
    if name == f"tp 1 = tp {tp}":
        if cause.kind in ("sharding", "reduce"):
            return "one rank alone has nothing to cut or to sum"
        if 0 < len(cause.ranks) < tp:
            return "other ranks are right"
    if name == "prefill = decode" and cause.steps and min(cause.steps) > 0:
        return "the prefill is right"
    return ""
