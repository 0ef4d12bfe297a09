"""One tap of the engine held against the golden one: metrics, and which ranks are wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.taps.names import operation_at
from lockstep.sessions import layouts, slices
from lockstep.sessions.errors import LayoutError
from lockstep.sessions.metrics import Metrics, coarser, metrics
from lockstep.workbench.diagnosis.recording import Array, Recording, unpadded

#: What the comparison found where no metric can be taken: everything is unknown.
_NOTHING = Metrics(math.inf, math.inf, math.nan, math.inf, math.nan, 0)


@dataclass(frozen=True, slots=True)
class TapComparison:
    """`metrics` is None where a side has no tensor (`reason` states which). `broken` is what is wrong
    beyond rounding, "" if nothing is: shapes, NaN or infinities, replicas that disagree (`odd_ranks`)."""

    metrics: Metrics | None
    reason: str = ""
    broken: str = ""
    odd_ranks: tuple[int, ...] = ()


def compare(
    engine: Recording, tap: str, step: int, seq: int, right: NDArray[Any], golden_dtype: str, part: str = ""
) -> TapComparison:
    """The engine's tensor, rebuilt from its ranks, against the golden one, `right`, which is that `part` of the whole.
    Of a tensor of which both have some rows those are compared that both have."""
    if not engine.has_tap(tap):
        return TapComparison(None, "the engine has no such tap")
    try:
        ours = engine.session.rebuilt(tap, step=step, seq=seq, branch=engine.branch)
        if ours.array is None:
            return TapComparison(None, ours.note or "not captured")
        left = ours.array if ours.slice == part else slices.apply(ours.array, part)
        right = right if ours.slice == part else slices.apply(right, ours.slice)
        right = _as_written(engine, tap, step, seq, right)
        left = unpadded(left, right.shape[-1]) if tap == "logits" else left
    except LayoutError as error:
        return TapComparison(_NOTHING, broken=str(error))
    found = metrics(left, right, coarser(engine.dtype, golden_dtype))
    odd = ours.note if ours.disagreeing_ranks else ""  # a rank that left nothing is not wrong
    return TapComparison(found, broken=_broken(found) or odd, odd_ranks=ours.disagreeing_ranks)


def _broken(found: Metrics) -> str:
    if found.shapes:
        return f"shape {list(found.shapes[0])} instead of {list(found.shapes[1])}"
    if found.nan_engine > found.nan_golden:
        return f"{found.nan_engine} of {found.size} elements are NaN"
    if found.mismatched:
        return f"{found.mismatched} elements are infinite on one side only"
    return ""


def wrong_ranks(
    engine: Recording, golden: Recording, tap: str, step: int, seq: int, limit: float
) -> tuple[int, ...]:
    """The ranks whose own part errs by more than `limit`, the error and the limit on the whole tensor's scale.

    Empty where the parts cannot be determined: what diverged then is the tensor as a whole.
    """
    right = golden.whole_or_none(tap, step, seq)
    right = None if right is None else _as_written(engine, tap, step, seq, right)
    held = {rank: engine.shard(tap, rank, step, seq) for rank in range(engine.ranks)}
    arrays = {rank: array for rank, array in held.items() if array is not None}
    layout = engine.layout(tap)
    if right is None or len(arrays) < engine.ranks or layout.kind == "partial":
        return ()
    try:
        lengths = layouts.sizes(layout, arrays, engine.ranks) if layout.kind == "shard" else None
        parts = layouts.cut(layout, right, engine.ranks, lengths)
    except (LayoutError, IndexError):
        return ()
    scale = _rms(right)
    return tuple(rank for rank, array in arrays.items() if _error(array, parts[rank]) > limit * scale)


def _as_written(engine: Recording, tap: str, step: int, seq: int, right: NDArray[Any]) -> NDArray[Any]:
    """Of a golden tensor with a row of each position that is attended to those of the pass, which are all that the dump
    of another engine has; other tensors as they are."""
    operation = operation_at(tap)
    if engine.session.meta.foreign is None or operation is None or operation.form != "cached_rows":
        return right
    return right[-len(engine.sequences(step)[seq].ids) :]


def _rms(x: Array) -> float:
    finite = x[np.isfinite(x)]
    return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0


def _error(seen: Array, right: Array) -> float:
    """Root-mean-square difference; infinite where shapes or non-finite elements differ."""
    found = metrics(seen, right, "float64")
    return found.rel_l2 * _rms(right) if math.isfinite(found.rel_l2) else math.inf
