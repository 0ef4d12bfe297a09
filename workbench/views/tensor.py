"""One captured tensor: rebuilt from all ranks, of one rank, golden's, or the difference; and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions import layouts
from lockstep.sessions.errors import LayoutError, SessionError
from lockstep.sessions.records import TensorRecord
from lockstep.sessions.text import clean
from lockstep.workbench.views.axes import Axis, by_head, tap_axes
from lockstep.workbench.views.difference import less
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where

#: The most elements that are turned into float32 for a look.
_MOST = 64_000_000
#: What can be shown of a tensor besides its values.
REBUILT, GOLDEN, DIFFERENCE = "rebuilt", "golden", "difference"


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor as it was asked for, of the `step` that has it last. `array` is None with the reason in `note`. `golden`
    is the reference's, of the same shape, where there is one. `slice` is the part that was captured ("" = whole)."""

    tap: str
    step: int
    view: str
    array: NDArray[np.float32] | None = None
    axes: tuple[Axis, ...] = ()
    golden: NDArray[np.float32] | None = None
    dtype: str = ""
    slice: str = ""
    layout: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class TensorFigures:
    """Statistics of what is shown, NaN and Inf counted and left out; `counts` is the histogram from `minimum` to
    `maximum`."""

    minimum: float
    maximum: float
    mean: float
    rms: float
    deviation: float
    nan: int
    inf: int
    zeros: int
    count: int
    counts: tuple[int, ...]


def tensor(source: SessionSource, where: Where, tap: int, view: str = REBUILT) -> Tensor:
    """A tap's tensor at `where`. `view`: "rebuilt" from all ranks, "rank N", "golden" or "difference" (the rebuilt less
    golden's)."""
    info = source.session.taps[tap]
    there = source.passed(where, info.name)
    empty = Tensor(clean(info.name, limit=120), there.step, view, layout=clean(info.layout, limit=60))
    try:
        return _found(source, there, info.name, empty)
    except SessionError as error:
        return replace(empty, note=clean(str(error), limit=300))


def _found(source: SessionSource, where: Where, name: str, empty: Tensor) -> Tensor:
    session = source.session
    parts = (
        session.parts(name, step=where.step, seq=where.seq, branch=where.branch)
        if where.step in source.reach(where.branch)
        else {}
    )
    rank = int(empty.view.split()[1]) if empty.view.startswith("rank ") else None
    if not parts or (rank is not None and rank not in parts):
        return empty
    record = parts[min(parts) if rank is None else rank]
    array: NDArray[np.generic] | None
    if rank is None:
        rebuilt = session.rebuilt(name, step=where.step, seq=where.seq, branch=where.branch)
        array, part, note = rebuilt.array, rebuilt.slice, clean(rebuilt.note, limit=300)
    else:
        array = session.tensor(name, step=where.step, rank=rank, seq=where.seq, branch=where.branch)
        part, note = record.slice, ""
    found = replace(empty, dtype=clean(record.dtype, limit=20), slice=clean(part, limit=60), note=note)
    if array is None:
        return found
    if array.size > _MOST:
        return replace(found, note=f"{array.size} elements are too many to show")
    shown = _plain(array)
    reported = _axes(source, where, name, shown.shape, part, parts, rank)
    golden = _golden(source, where, name) if rank is None else None
    if golden is not None and golden.shape != shown.shape:
        found = replace(found, note=f"golden's is of shape {golden.shape}, this one of {shown.shape}")
        golden = None
    if empty.view not in (GOLDEN, DIFFERENCE):
        return replace(found, array=shown, axes=reported, golden=golden)
    if golden is None:
        return replace(found, note=found.note or "golden's tensor was not captured")
    values = golden if empty.view == GOLDEN else less(shown, golden, name)
    return replace(found, array=values, axes=reported, golden=golden)


def _golden(source: SessionSource, where: Where, name: str) -> NDArray[np.float32] | None:
    reference = source.golden(where)
    if reference is None or not reference.session.has_tap(name):
        return None
    array = reference.session.rebuilt(name, step=where.step, seq=where.seq).array
    return None if array is None or array.size > _MOST else _plain(array)


def _plain(array: NDArray[np.generic]) -> NDArray[np.float32]:
    """As float32, a single number as a vector of one."""
    return np.atleast_1d(array.astype(np.float32))


def _axes(
    source: SessionSource,
    where: Where,
    name: str,
    shape: Sequence[int],
    part: str,
    parts: dict[int, TensorRecord],
    rank: int | None,
) -> tuple[Axis, ...]:
    """The axes of what is shown; along the dimension that is spread over the ranks they know who holds what, or where
    the rank's own share begins."""
    sequence = source.sequence(where.step, where.branch, where.seq)
    model = source.meta.model
    positions = list(sequence.positions) if sequence is not None else []
    axes = list(tap_axes(name, shape, part, positions))
    owners = _owners(source, name, parts)
    if owners is not None and owners[0].dim < len(axes):
        cut, ranks = owners
        axis = axes[cut.dim]
        if rank is None and len(ranks) == len(axis):
            axes[cut.dim] = replace(axis, ranks=ranks)
        elif rank is not None and (leader := rank - rank % cut.replicas) in ranks:
            first = ranks.index(leader)
            axes[cut.dim] = replace(axis, numbers=range(first, first + len(axis)))
    return by_head(name, axes, model.head_dim)


def _owners(
    source: SessionSource, name: str, parts: dict[int, TensorRecord]
) -> tuple[layouts.Layout, list[int]] | None:
    """How a tap is sharded, and for each element of that dimension the first rank that holds it; None where it is not,
    or not all shards are known."""
    try:
        layout = layouts.parse(source.session.tap(name).layout)
        if layout.kind != "shard":
            return None
        arrays = {rank: one.array for rank, one in parts.items()}
        sizes = layouts.sizes(layout, arrays, source.session.ranks)
        groups = layouts.shard_groups(layout, source.session.ranks)
    except LayoutError:
        return None
    if len(sizes) != len(groups):
        return None
    return layout, [group[0] for group, size in zip(groups, sizes, strict=True) for _ in range(size)]


def tensor_figures(values: NDArray[np.float32], bins: int = 48) -> TensorFigures:
    """The statistics of `values`, with a histogram of so many bins."""
    flat = values.reshape(-1)
    finite = flat[np.isfinite(flat)].astype(np.float64)
    nan = int(np.isnan(flat).sum())
    if not finite.size:
        gone = float("nan")
        return TensorFigures(gone, gone, gone, gone, gone, nan, flat.size - nan, 0, flat.size, ())
    low, high = float(finite.min()), float(finite.max())
    counts, _ = np.histogram(finite, bins=bins, range=(low, high if high > low else low + 1))
    return TensorFigures(
        low,
        high,
        float(finite.mean()),
        float(np.sqrt((finite**2).mean())),
        float(finite.std()),
        nan,
        int(flat.size - finite.size - nan),
        int((flat == 0).sum()),
        flat.size,
        tuple(int(c) for c in counts),
    )
