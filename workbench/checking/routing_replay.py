"""Replay of routing: the run once more with the reference's experts forced onto it, as a what-if.

How much of the logits' difference goes then is what other choices of experts account for: what is left is made by
everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
from msgspec import structs

from lockstep.engine.graph import Kind
from lockstep.engine.graph.operation import CHOICES
from lockstep.engine.scratch import ScratchFolder
from lockstep.engine.taps.names import operation_at
from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.checking.corrections import corrections
from lockstep.workbench.checking.forced_run import ForcedRun
from lockstep.workbench.checking.pipeline import CheckResult, Progress, Reference
from lockstep.workbench.diagnosis.quantisation import divergence_of
from lockstep.workbench.diagnosis.recording import Recording
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.inferior.patches import Patch
from lockstep.workbench.judgements.golden_event import RoutingReplay

#: What is forced: the experts that a token goes to and the keys that an indexer chose, or the experts' weights as well.
Forced = Literal["ids", "weights"]
_KINDS: Mapping[Forced, tuple[Kind, ...]] = {"ids": CHOICES, "weights": (*CHOICES, "choice_weights")}


def replay_routing(
    inferior: Inferior,
    reference: Reference,
    result: CheckResult,
    forced: Forced,
    progress: Progress = lambda what, done, of: None,
) -> CheckResult:
    """`result` with what becomes of its logits under the reference's routing; as it is of a model without choices."""
    if (inferior.model.experts is None and inferior.model.indexer is None) or result.golden_session is None:
        return result
    with ExitStack() as stack:
        folder = stack.enter_context(ScratchFolder.make("routing"))
        engine, golden = (
            stack.enter_context(Session.open(path, UNLIMITED))
            for path in (result.engine_session, reference.golden)
        )
        run = ForcedRun(
            inferior, reference, folder.path / "run.session", dict(result.event.rules), progress=progress
        )
        run.record(run.path, partial(_routing, engine, golden, _KINDS[forced]))
        again = stack.enter_context(Session.open(run.path, UNLIMITED))
        before, after = (_divergence(side, golden) for side in (engine, again))
    reported = RoutingReplay(forced, before, after)
    return replace(result, event=structs.replace(result.event, replay=reported))


def _routing(plain: Session, golden: Session, kinds: tuple[Kind, ...], step: int) -> Iterator[Patch]:
    """The reference's routing of a step."""

    def wanted(tap: str) -> bool:
        operation = operation_at(tap)
        return operation is not None and operation.kind in kinds

    return corrections(plain, golden, step, wanted)


def _divergence(run: Session, golden: Session) -> float | None:
    """KL of the run's next tokens from the reference's, in nats, on average over all passes; None without logits."""
    ours, theirs = Recording(run), Recording(golden)
    found = [
        divergence_of(right[-1], other[-1])
        for step in ours.steps
        for seq in ours.sequences(step)
        if (right := theirs.whole_or_none("logits", step, seq)) is not None
        and (other := ours.whole_or_none("logits", step, seq)) is not None
    ]
    return float(np.mean(found)) if found else None
