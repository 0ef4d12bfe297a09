"""What runs that agree, and runs that do not, show of the causes of a divergence."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.workbench.checking.differing_runs import with_runs
from lockstep.workbench.checking.invariants.invariant import Invariant
from lockstep.workbench.judgements.cause import Cause
from lockstep.workbench.judgements.golden_event import GoldenEvent

TWO, DECODE = "tp 1 = tp 2", "prefill = decode"


def summary(cause: dict[str, Any], name: str, result: str) -> tuple[list[str], list[str]]:
    """The evidence of a cause at TP 2 and the notes, after one comparison."""
    one = Invariant(name=name, result=result, summary="layers.0.attn.o_proj, token 0: off by 1", means="here",
                    tap="layers.0.attn.o_proj")  # fmt: skip
    event = GoldenEvent(verdict="diverged", tp=2, causes=(Cause(name="a", evidence=("first",), **cause),))
    found = with_runs(event, [one])
    first, *evidence = found.causes[0].evidence
    assert first == "first"
    return evidence, list(found.notes)


@pytest.mark.parametrize(
    ("cause", "name", "result", "evidence"),
    [
        ({"kind": "reduce", "ranks": (0, 1)}, TWO, "broken", "as it must be: one rank alone"),
        (
            {"kind": "reduce", "ranks": (0, 1)},
            TWO,
            "holds",
            "against it: tp 1 = tp 2 holds, but one rank alone",
        ),
        ({"kind": "weight", "ranks": (1,)}, TWO, "holds", "against it: tp 1 = tp 2 holds, but other ranks"),
        ({"kind": "mask", "ranks": (0, 1)}, TWO, "holds", ""),
        ({"kind": "mask", "tap": "layers.0.attn.o_proj"}, TWO, "broken", "tp 1 = tp 2 is broken there first"),
        ({"kind": "cache", "steps": (1, 2)}, DECODE, "holds", "but the prefill is right"),
        ({"kind": "cache", "steps": (1, 2)}, DECODE, "broken", "as it must be: the prefill is right"),
        ({"kind": "cache", "steps": (0, 1, 2)}, DECODE, "holds", ""),
    ],
)
def test_a_comparison_speaks_for_or_against_what_it_must_or_must_not_break(
    cause: dict[str, Any], name: str, result: str, evidence: str
) -> None:
    found, notes = summary(cause, name, result)
    assert len(found) == bool(evidence)
    assert evidence in "".join(found)
    assert notes[0].startswith("runs that agree" if result == "holds" else "runs that do not agree")


def test_what_was_not_tried_shows_nothing() -> None:
    assert summary({"kind": "reduce"}, TWO, "not tried") == ([], [])
