"""A residual stream whose channels stand in another order throughout: in the embedding, the norms, and the rows and
columns of all matrices that write and read it.

Engines sort them for a quantiser, or pad and tile them for a kernel. Operation by operation all that touches the
stream is wrong then, though nothing is. So the order is found from the embedding, whose numbers are those of the
checkpoint one by one, all tensors of the stream are put back into the checkpoint's, and judged again.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.taps.names import operation_at
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.operations.sites import sites_of
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.stream_scale import RestoredStream, erring

#: Tokens by which channels are distinguished.
_TOKENS = 64


def ordered_stream(taps: RecordedTaps, facts: Facts, wrong: Collection[str]) -> RestoredStream | None:
    """The recording with the stream's channels in the checkpoint's order, if that puts right most of what errs. `wrong`
    are the taps of operations that err."""
    order = _order(taps, facts) if "embed" in wrong else None
    if order is None:
        return None
    stream = [
        tap.name for tap in taps.recording.session.taps if _carries(tap.name) and taps.captured(tap.name)
    ]
    restored = taps.ordered(stream, order)
    judged = {*stream, *wrong}
    before, after = erring(judged, taps, facts), erring(judged, restored, facts)
    if 2 * len(after) >= len(before):
        return None
    moved = int((order != np.arange(len(order))).sum())
    return RestoredStream(
        restored,
        tuple(tap for tap in stream if tap not in after),
        f"{moved} of {len(order)} channels of the whole residual stream stand in another order, in all that writes and "
        "reads it",
    )


def _carries(tap: str) -> bool:
    """Whether the tap's channels are those of the stream."""
    operation = operation_at(tap)
    return operation is not None and operation.width == "hidden"


def _order(taps: RecordedTaps, facts: Facts) -> NDArray[np.intp] | None:
    """Where in the recorded stream each channel of the checkpoint stands; None if the embedding is not so ordered, or
    as it should be."""
    for site in sites_of("embed", taps, facts):
        if not isinstance(site, Site) or site.deviation is None or not site.parts[0].fits:
            continue
        rows = np.unique(np.array([row.token for row in site.rows]), return_index=True)[1][:_TOKENS]
        seen, expected, noise = (x[rows] for x in (site.seen, site.expected, site.parts[0].noise))
        order = matched(seen, expected, noise)
        if order is not None and (order != np.arange(len(order))).any():
            return order
    return None


def matched(seen: Array, expected: Array, noise: Array) -> NDArray[np.intp] | None:
    """The column of `seen` that is each column of `expected` within rounding, no column twice; None if one has none.
    Of columns that are alike the first stands for the first."""
    if not np.isfinite(seen).all():
        return None
    squares = (seen**2).sum(axis=0)
    found = np.empty(expected.shape[1], np.intp)
    free = np.zeros(seen.shape[1])
    for column in range(len(found)):
        found[column] = np.argmin(squares - 2 * expected[:, column] @ seen + free)
        free[found[column]] = np.inf
    error, rounding = (np.linalg.norm(x, axis=0) for x in (seen[:, found] - expected, noise))
    return found if bool((error <= 4 * rounding).all()) else None
