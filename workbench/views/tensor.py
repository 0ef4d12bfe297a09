"""One captured tensor: rebuilt from all ranks, of one rank, golden's, or the difference; and its figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sessions.errors import SessionError
from sessions.text import clean
from workbench.views.source import SessionSource
from workbench.views.where import Where

#: The most elements that are turned into float32 for a look.
_MOST = 64_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor as it was asked for; `array` is None with the reason in `note`. `views` are what can be asked."""

    tap: str
    view: str
    views: tuple[str, ...]
    array: NDArray[np.float32] | None
    dtype: str
    slice: str
    layout: str
    note: str


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


def tensor(source: SessionSource, where: Where, tap: int, view: str) -> Tensor:
    """A tap's tensor at `where`. `view`: "rebuilt", "rank N", "golden" or "difference"."""
    session = source.session
    info = session.taps[tap]
    views = ["rebuilt", *(f"rank {rank}" for rank in range(session.ranks))]
    if source.golden(where) is not None:
        views += ["golden", "difference"]
    if view not in views:
        view = "rebuilt"
    found: tuple[NDArray[np.generic] | None, str, str, str]
    try:
        found = _array(source, where, info.name, view)
    except SessionError as error:
        found = (None, "", "", clean(str(error), limit=300))
    array, dtype, part, note = found
    if array is not None and array.size > _MOST:
        note = f"{array.size} elements are too many to show"
        array = None
    shown = array.astype(np.float32) if array is not None else None
    name, layout = clean(info.name, limit=120), clean(info.layout, limit=60)
    return Tensor(name, view, tuple(views), shown, dtype, part, layout, note)


def _array(
    source: SessionSource, where: Where, name: str, view: str
) -> tuple[NDArray[np.generic] | None, str, str, str]:
    """The array, its dtype, the part of the whole that it is, and what is to be said about it."""
    session = source.session
    if view.startswith("rank"):
        record = session.capture(
            name, step=where.step, rank=int(view.split()[1]), seq=where.seq, branch=where.branch
        )
        if record is None:
            return None, "", "", ""
        array = session.tensor(name, step=where.step, rank=record.rank, seq=where.seq, branch=where.branch)
        return array, record.dtype, record.slice, ""
    if view == "rebuilt":
        rebuilt = session.rebuilt(name, step=where.step, seq=where.seq, branch=where.branch)
        first = session.capture(name, step=where.step, rank=0, seq=where.seq, branch=where.branch)
        dtype = first.dtype if first is not None else ""
        return rebuilt.array, dtype, rebuilt.slice, clean(rebuilt.note, limit=300)
    reference = source.golden(where)
    assert reference is not None, "golden views are offered only where there is one"
    golden = reference.session.rebuilt(name, step=where.step, seq=where.seq)
    if view == "golden":
        return golden.array, "", golden.slice, clean(golden.note, limit=300)
    ours = session.rebuilt(name, step=where.step, seq=where.seq, branch=where.branch)
    if ours.array is None or golden.array is None:
        return None, "", "", "not captured on both sides"
    if ours.array.shape != golden.array.shape:
        shapes = f"{ours.array.shape} and golden {golden.array.shape}"
        return None, "", "", f"shapes differ: {shapes}"
    return ours.array.astype(np.float32) - golden.array.astype(np.float32), "", ours.slice, ""


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


def plane(values: NDArray[np.float32], index: tuple[int, ...]) -> NDArray[np.float32]:
    """The last two dimensions at `index` of the others; a vector is one row."""
    if values.ndim < 2:
        return values.reshape(1, -1)
    return np.ascontiguousarray(values[index])
