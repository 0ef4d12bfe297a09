"""Name the cause of a divergence from what was recorded: fit known transforms and see what they leave.

Each signature says how the engine's tensor would come about from the golden ones, fits the free
parameters, and accuses only if what remains is rounding. It reads the two sessions (and, where given, the
checkpoint's weights), never the rules in force: an unknown engine is diagnosed like our own.
"""

from __future__ import annotations

from collections.abc import Mapping

from sessions.session import Session
from workbench.diagnosis.dataflow import is_known
from workbench.diagnosis.recording import Recording
from workbench.diagnosis.signatures.attention import ATTENTION
from workbench.diagnosis.signatures.evidence import Evidence, Misread, Signature, Weights
from workbench.diagnosis.signatures.linear import LINEAR, factor
from workbench.diagnosis.signatures.loading import LOADING
from workbench.diagnosis.signatures.output import OUTPUT
from workbench.diagnosis.signatures.rope import ROPE
from workbench.views.causes import Cause
from workbench.views.golden_event import Divergence

#: Tap kind -> the signatures that can explain a divergence there.
_CAUSES: Mapping[str, tuple[Signature, ...]] = {**LINEAR, **ROPE, **ATTENTION, **OUTPUT, **LOADING}


def explain(
    engine: Session,
    golden: Session,
    first: Divergence | None,
    *,
    branch: int = 0,
    weights: Weights | None = None,
    misread: Misread | None = None,
) -> list[Cause]:
    """The causes that fit the first divergence of the engine's `branch`, best first; empty where none does.

    `weights` reads the checkpoint and lets causes be told that show in the weights' own numbers; `misread` reads it as
    loaders do that are wrong.
    """
    if first is None:
        return []
    ranks = first.ranks if len(first.ranks) < engine.ranks else ()
    sides = Recording(engine, branch), Recording(golden)
    evidence = Evidence(*sides, first.tap, first.step, first.seq, ranks, weights, golden.meta, misread)
    known = _CAUSES.get(evidence.kind) if is_known(first.tap) else None
    found = [signature(evidence) for signature in known or (factor,)]
    return sorted(filter(None, found), key=lambda cause: cause.unexplained)
