"""lens: what every layer would choose, if the final norm and the output head came right after it.

The ranks compute it (the head may be gigabytes and stays where it is); what they answer goes into the session as a
`LensEvent` of the step, so that a replay and the screens have it too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.engine.ranks.messages import LogitLens
from lockstep.engine.ranks.wire import WireArray, widen
from lockstep.workbench.debugger.answers import Position, TableResult
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.golden_reference import golden_tensor
from lockstep.workbench.debugger.core.motion import require_step
from lockstep.workbench.debugger.core.registry import Argument, command
from lockstep.workbench.debugger.errors import CommandError, DebuggerError, NotCaptured
from lockstep.workbench.views.candidates import Candidate
from lockstep.workbench.views.lens import KIND, LensEvent, LensRow, lens_layers, recorded_lens

#: Candidates of a layer that are kept.
TOP = 10


@command(
    "lens", arguments=(Argument("count", "int", default=1, help="how many candidates of a layer"),), group="inspection",
    help="the logit lens: what each layer would choose if the final norm and the head came next",
    details="Takes the residual of the sequence's last position after each layer of this step. It is kept in the"
    " session; a replay shows what was kept. Once `golden` has run, the reference's own rows stand beside.",
)  # fmt: skip
def lens(debugger: Debugger, count: int) -> TableResult:
    """A layer a row: its best candidates, and how sure it is."""
    at = require_step(debugger)
    if at.step > debugger.timeline.last(at.branch):
        raise CommandError(f"step {at.step} is not finished: `next` finishes it")
    found = _measured(debugger, at) if debugger.live else _recorded(debugger, at)
    reported = debugger.timeline.sequence(at.branch, at.step, debugger.sequence)
    emitted = reported.emitted if reported is not None else None
    rows = [
        [
            layer.tap.removesuffix(".mlp_residual"),
            _labels(layer.candidates, count),
            layer.candidates[0].probability,
            layer.entropy,
            _labels(layer.golden, count) if layer.golden else None,
        ]
        for layer in lens_layers(found, debugger.texts, emitted)
    ]
    chosen = "nothing" if emitted is None else debugger.texts.label(emitted)
    return TableResult(
        f"step {at.step} → {chosen}", ["after", "would choose", "probability", "entropy", "golden"], rows
    )


def _labels(candidates: Sequence[Candidate], count: int) -> str:
    return "  ".join(one.label for one in candidates[: max(1, count)])


def _recorded(debugger: Debugger, at: Position) -> LensEvent:
    found = recorded_lens(debugger.session, at.branch, at.step, debugger.sequence)
    if found is None:
        raise NotCaptured(f"no lens was recorded at step {at.step}: `lens` in the live run keeps it")
    return found


def residual_taps(layers: int) -> list[str]:
    """The residual stream from its beginning on."""
    return ["embed", *(f"layers.{i}.mlp_residual" for i in range(layers))]


def _measured(debugger: Debugger, at: Position) -> LensEvent:
    """Run the step again for its residuals, have the ranks look at them, and keep it."""
    engine = debugger.engine
    engine.land()
    names = residual_taps(engine.inferior.model.num_layers)
    places = [debugger.timeline.places.exact(name) for name in names]
    again = engine.recapture(at.branch, at.step, places, keep=False)
    ours = (one for one in again.tensors if (one.rank, one.seq) == (0, debugger.sequence))
    whole = {one.tap: widen(one.array, one.dtype) for one in ours}
    rows = np.stack([whole[name][-1].astype(np.float32) for name in names])  # [1 + layers, H]
    golden = _golden_rows(debugger, names, [whole[name].shape for name in names])
    found = LensEvent(
        debugger.sequence,
        _looked(debugger, names, rows),
        None if golden is None else _looked(debugger, names, golden),
    )
    owner = debugger.timeline.owner(at.branch, at.step).id
    debugger.journal(
        KIND, f"logit lens over {len(names) - 1} layers", Position(owner, at.step), msgspec.to_builtins(found)
    )
    return found


def _golden_rows(
    debugger: Debugger, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> NDArray[np.float32] | None:
    """The reference's residuals at the same step; None where there is none of these very tokens."""
    if debugger.settings.golden is None:
        return None
    try:
        rows = [golden_tensor(debugger, name, shape)[-1] for name, shape in zip(names, shapes, strict=True)]
    except DebuggerError:
        return None  # it was recorded for another branch or not so far: the lens of this one stands alone
    return np.stack(rows).astype(np.float32)


def _looked(debugger: Debugger, names: Sequence[str], rows: NDArray[np.float32]) -> tuple[LensRow, ...]:
    client = debugger.engine.inferior.client
    report = client.call(LogitLens(WireArray.of(rows, "float32"), TOP))[0]
    return tuple(
        LensRow(
            name,
            tuple(reported.top_ids),
            tuple(_finite(logit) for logit in reported.top_logits),
            _finite(reported.logsumexp),
            _finite(reported.entropy),
        )
        for name, reported in zip(names, report.layers, strict=True)
    )


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
