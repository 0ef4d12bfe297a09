"""The causes of a divergence: found on the operations' own inputs; where no variant is known yet, by signatures."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from sessions import Session
from workbench.diagnosis.diagnose import Explanation
from workbench.diagnosis.explain import explain
from workbench.diagnosis.weights import checkpoint_misreadings, checkpoint_weights
from workbench.views.causes import UNNAMED, Cause
from workbench.views.golden_event import Divergence
from workbench.views.known_faults import fault_of


def named(
    found: Explanation, engine: Session, golden: Session, first: Divergence | None, checkpoint: Path
) -> list[Cause]:
    """All causes, in the order in which they show. `first` is where the run leaves the golden reference."""
    unnamed = next((cause for cause in found.causes if cause.kind == UNNAMED), None)
    judged = found.judged and first is not None and first.tap not in {one.tap for one in found.unjudged}
    if first is None or (judged and (unnamed is None or unnamed.tap != first.tap)):
        return list(found.causes)  # an operation that is right on its own inputs is accused of nothing
    weights, misread = checkpoint_weights(checkpoint), checkpoint_misreadings(checkpoint)
    signed = explain(engine, golden, first, weights=weights, misread=misread)
    if not signed:
        return list(found.causes)
    told = [
        replace(one, fault=fault_of(one.name, one.transform if isinstance(one.transform, dict) else {}))
        for one in signed
    ]
    if unnamed is not None:
        told = [
            replace(
                one, tap=unnamed.tap, place=unnamed.place, layers=unnamed.layers, ranks=unnamed.ranks,
                heads=unnamed.heads, steps=unnamed.steps, evidence=unnamed.evidence, alternative=number > 0,
            )
            for number, one in enumerate(told)
        ]  # fmt: skip
    return told + [cause for cause in found.causes if cause is not unnamed]
