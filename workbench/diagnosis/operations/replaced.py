"""Recordings in which what an operation gave is replaced by what it should have given, or by the reference's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lockstep.engine.graph.operation import OF_POSITIONS
from lockstep.engine.taps.names import operation_at
from lockstep.sessions import layouts
from lockstep.sessions.errors import LayoutError
from lockstep.workbench.diagnosis.operations.facts import rounded
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: What each part of a site gives instead.
Outputs = Sequence[Array]


def with_outputs(
    tap: str, taps: RecordedTaps, outputs: Iterable[tuple[Site, Outputs]]
) -> RecordedTaps | None:
    """The recording with other outputs of an operation; None where some rank has none. Passes in which it could not be
    judged have none either."""
    tensors: dict[int, list[Array | None]] = {}
    for site, given in outputs:
        held: list[Array | None] = [None] * len(taps.passes)
        for i, output in zip(site.passes, _by_pass(site, given), strict=True):
            held[i] = output
        if (operation := operation_at(tap)) and operation.form in OF_POSITIONS and site.operation != "cache":
            held = _with_rows_before(held, taps)
        tensors.update(dict.fromkeys(site.ranks, held))
    return taps.replaced(tap, tensors) if len(tensors) == len(taps.ranks) else None


def expected_of(site: Site) -> Outputs:
    """What each part should have given."""
    return [part.expected for part in site.parts]


def _with_rows_before(held: Sequence[Array | None], taps: RecordedTaps) -> list[Array | None]:
    """What is made of cached rows, of which an operation gives those of the new tokens: below those of the passes
    before of the same sequence."""
    found: list[Array | None] = []
    last: dict[int, Array | None] = {}
    for one, new in zip(taps.passes, held, strict=True):
        before = last.get(one.seq, np.zeros((0, 0)))
        whole = (
            None if before is None or new is None else np.concatenate([before, new]) if before.size else new
        )
        last[one.seq] = whole
        found.append(whole)
    return found


def _by_pass(site: Site, outputs: Outputs) -> Outputs:
    if len(outputs) > 1 or len(site.passes) == 1:
        return outputs
    counts = [len(site.taps.passes[i].rows) for i in site.passes]
    if sum(counts) != len(outputs[0]):  # of logits a row each
        counts = [1] * len(site.passes)
    return np.split(outputs[0], np.cumsum(counts)[:-1])


def completed(tap: str, taps: RecordedTaps, dtype: str) -> RecordedTaps:
    """The recording with the golden tensors of a tap, rounded to `dtype`, wherever it has none."""
    if taps.golden is None or not taps.has(tap):
        return taps
    tensors: dict[int, list[Array | None]] = {rank: list(taps.tensors(tap, rank)) for rank in taps.ranks}
    for i, one in enumerate(taps.passes):
        lacking = [rank for rank in taps.ranks if tensors[rank][i] is None]
        whole = taps.golden.whole_or_none(tap, one.step, one.seq) if lacking else None
        if whole is None:
            continue
        try:
            parts = layouts.cut(taps.recording.layout(tap), whole, len(taps.ranks))
        except LayoutError:
            continue
        for rank in lacking:
            tensors[rank][i] = rounded(parts[rank], dtype).astype(np.float64)
    return taps.replaced(tap, tensors)
