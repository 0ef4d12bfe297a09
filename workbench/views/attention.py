"""What one layer attends to: probabilities or scores of every head, a query a row, keys by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sessions.errors import SessionError
from workbench.views.source import Source
from workbench.views.where import Where

#: How many steps back the rows of the last token are gathered into one matrix.
_ROWS = 256
#: The largest matrix of one layer that is put together, in elements.
_LARGEST = 2_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """One layer at one step. `values[heads, queries, keys]` float32; row i is the query at position
    `first_query + i`; -inf is a key that the mask hides. `golden` has the same shape, or is None."""

    layer: int
    kind: str
    values: NDArray[np.float32] | None
    first_query: int
    kv_heads: int
    ranks: int
    missing: str = ""
    golden: NDArray[np.float32] | None = None

    @property
    def heads(self) -> int:
        """How many query heads."""
        return 0 if self.values is None else self.values.shape[0]

    def rank_of(self, head: int) -> int:
        """The rank that computes a head."""
        return head * self.ranks // max(1, self.heads)

    def kv_of(self, head: int) -> int:
        """The key/value head that a query head reads."""
        return head * self.kv_heads // max(1, self.heads)


@dataclass(frozen=True, slots=True)
class RowFigures:
    """One query's row of one head: its sum, entropy in nats, how many keys hold 99 % of it, the strongest key."""

    total: float
    entropy: float
    keys: int
    strongest: int


def attention(source: Source, where: Where, layer: int, kind: str) -> Attention:
    """The layer's `kind` ("probs" or "scores") at `where`, with the rows of the steps before gathered in."""
    tap = f"layers.{layer}.attn.{kind}"
    values, first, missing = _gather(source, where, tap)
    golden = None
    reference = source.golden(where)
    if values is not None and reference is not None:
        golden = _matching(_gather(reference, replace(where, branch=0), tap)[0], values.shape)
    model = source.meta.get("model")
    kv_heads = model.get("num_kv_heads") if isinstance(model, dict) else None
    heads = values.shape[0] if values is not None else 1
    return Attention(
        layer=layer,
        kind=kind,
        values=values,
        first_query=first,
        kv_heads=kv_heads if isinstance(kv_heads, int) and 0 < kv_heads <= heads else heads,
        ranks=source.session.ranks,
        missing=missing,
        golden=golden,
    )


def _matching(golden: NDArray[np.float32] | None, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    """The reference's rows of the same queries: both end with the present one, and it may have more before."""
    if golden is None or golden.shape[1] < shape[1]:
        return None
    last = golden[:, golden.shape[1] - shape[1] :]
    return last if last.shape == shape else None


def _gather(source: Source, where: Where, tap: str) -> tuple[NDArray[np.float32] | None, int, str]:
    """The matrix [heads, queries, keys] up to this step, the first query's position, and why there is none."""
    first = max(source.session.steps(where.branch).start, where.step - _ROWS)
    rows: list[NDArray[Any]] = []  # the present step's first
    shape, total = (0, 0), 0  # heads and keys, and the queries so far
    try:
        for step, found in source.back_from(tap, where, first):
            array = found.array if found.array is not None and found.array.ndim == 3 else None
            if not rows and array is None:
                return None, 0, found.note or "not captured"
            shape = shape if array is None or rows else (array.shape[0], array.shape[2])
            if array is None or array.shape[0] != shape[0]:
                break
            rows.append(array)
            total += array.shape[1]
            if not _is_whole(source, replace(where, step=step), array.shape[1]):
                break  # what came before in that step is not known
            if total * shape[0] * shape[1] > _LARGEST:
                break
    except SessionError as error:
        if not rows:
            return None, 0, str(error)
        raise
    return _stacked(rows, shape[0], total, shape[1]), shape[1] - total, ""


def _stacked(rows: Sequence[NDArray[Any]], heads: int, total: int, keys: int) -> NDArray[np.float32]:
    """The rows of all steps, the newest first, under each other; keys that were not there yet are hidden."""
    values = np.zeros((heads, total, keys), np.float32)
    end = total
    for block in rows:
        begin, width = end - block.shape[1], min(keys, block.shape[2])
        values[:, begin:end, :width] = block[:, :, :width]
        end = begin
    future = np.arange(keys)[None] > (keys - total + np.arange(total))[:, None]
    # What a causal mask hides is not there; a value that it failed to hide is, and must be seen.
    values[:, future & ((values == 0) | (values == -np.inf)).all(axis=0)] = -np.inf
    return values


def _is_whole(source: Source, where: Where, queries: int) -> bool:
    """Whether so many queries are all of the step's: of a prefill often only the last one is kept."""
    sequence = source.sequence(where.step, where.branch, where.seq)
    return sequence is not None and len(sequence.ids) == queries


def figures(row: NDArray[np.float32]) -> RowFigures:
    """The figures of one row [keys] of probabilities."""
    finite = np.where(np.isfinite(row), np.maximum(row, 0), 0).astype(np.float64)
    total = float(row.sum())
    share = finite / finite.sum() if finite.sum() > 0 else finite
    positive = share[share > 0]
    ordered = np.sort(share)[::-1]
    keys = int(np.searchsorted(np.cumsum(ordered), 0.99) + 1) if positive.size else 0
    return RowFigures(
        total, float(-(positive * np.log(positive)).sum()), keys, int(finite.argmax()) if row.size else 0
    )
