"""What one layer attends to: probabilities or scores of every head, a query a row, keys by position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions import slices
from lockstep.sessions.layouts import Rebuilt
from lockstep.workbench.views.chosen_keys import left_out
from lockstep.workbench.views.difference import less
from lockstep.workbench.views.present_layer import present_layer
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where

#: Steps back from which the rows of the last token are gathered into one matrix, and the most elements it may have.
ROWS, LARGEST = 256, 2_000_000


@dataclass(frozen=True, slots=True)
class RowFigures:
    """One query's row of one head: its sum, entropy in nats, how many keys hold 99 % of it, how many get anything,
    the strongest key. `keys` and `strongest` are None where the row is empty or not finite: nothing can be stated."""

    total: float
    entropy: float
    keys: int | None
    attended: int
    strongest: int | None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionHead:
    """One query head. `values[queries, keys]`; -inf is a key that the mask hides. `figures` are of the last query's
    probabilities, of scores of those that they give."""

    head: int
    rank: int
    kv_head: int
    values: NDArray[np.float32]
    figures: RowFigures


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention:
    """One layer at one step (the one before, where a step under way has not come to it): all query heads, or
    the one asked for. `values[heads, queries, keys]` are of all; row i
    is the query at position `first_query + i`; -inf is a key that the mask hides. None with the reason in `missing`.
    `golden` has the same shape, or is None. `left_out[queries, keys]`: what an indexer did not choose of what a query
    sees; None where none was recorded. `dropped` names what of it the capture's budget had no room for."""

    layer: int
    step: int
    seq: int
    kind: str
    values: NDArray[np.float32] | None = None
    first_query: int = 0
    heads: tuple[AttentionHead, ...] = ()
    golden: NDArray[np.float32] | None = None
    left_out: NDArray[np.bool_] | None = None
    missing: str = ""
    dropped: str = ""

    @property
    def difference(self) -> NDArray[np.float32] | None:
        """The values less golden's; None where there is no golden."""
        if self.values is None or self.golden is None:
            return None
        return less(self.values, self.golden, f"attn.{self.kind}")


def attention(
    source: SessionSource,
    where: Where,
    layer: int,
    kind: str = "probs",
    head: int | None = None,
    rows: int = ROWS,
    largest: int = LARGEST,
) -> LayerAttention:
    """The layer's `kind` ("probs" or "scores") at `where`, of all heads or of one. The rows of at most `rows` steps
    before are gathered in, up to `largest` elements. SessionError where the file is damaged."""
    tap = f"layers.{layer}.attn.{kind}"
    where = source.passed(where, tap)
    found = LayerAttention(layer, where.step, where.seq, kind)
    values, first, reported = _gather(source, where, tap, rows, largest)
    if values is None:
        return replace(found, missing=reported)
    count = len(values)
    if head is not None and not 0 <= head < count:
        return replace(found, missing=f"there is no head {head}: the layer has {count}")
    heads = _heads(source, values, range(count) if head is None else (head,), kind)
    unseen = left_out(source, where, layer, first, values.shape[1:])
    if unseen is not None:  # what is attended to all the same must be seen
        values[:, unseen & (values == 0).all(axis=0)] = -np.inf
    return replace(found, values=values, first_query=first, heads=heads, left_out=unseen, dropped=reported)


def attention_and_golden(
    source: SessionSource, where: Where, kind: str, layer: int | None = None
) -> LayerAttention:
    """The same of a layer (None: the one at `where`) with the golden reference's rows beside, where there are any of
    the same tokens."""
    layer = present_layer(source, where, f"attn.{kind}") if layer is None else layer
    found, reference = attention(source, where, layer, kind), source.golden(where)
    if found.values is None or reference is None:
        return found
    theirs = attention(reference, replace(where, branch=0), layer, kind).values
    return replace(found, golden=_matching(theirs, found.values.shape))


def _heads(
    source: SessionSource, values: NDArray[np.float32], shown: Iterable[int], kind: str
) -> tuple[AttentionHead, ...]:
    """The heads with the rank that computes each and the key/value head that it reads."""
    ranks, count = source.session.ranks, len(values)
    kv_heads = min(source.meta.model.num_kv_heads or count, count)
    newest = values[:, -1] if kind == "probs" else _softmax(values[:, -1])
    return tuple(
        AttentionHead(h, h * ranks // count, h * kv_heads // count, values[h], row_figures(newest[h]))
        for h in shown
    )


def _softmax(scores: NDArray[np.float32]) -> NDArray[np.float64]:
    """The probabilities [heads, keys] that scores give; a row that is not finite gives NaN."""
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
        found: NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True)
    return found


def _matching(golden: NDArray[np.float32] | None, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    """The reference's rows of the same queries: both end with the present one, and it may have more before."""
    if golden is None or golden.shape[1] < shape[1]:
        return None
    last = golden[:, golden.shape[1] - shape[1] :]
    return last if last.shape == shape else None


def _gather(
    source: SessionSource, where: Where, tap: str, rows: int, largest: int
) -> tuple[NDArray[np.float32] | None, int, str]:
    """The matrix [heads, queries, keys] up to this step, the first query's position, and why there is none or what is
    not in it."""
    if not source.session.has_tap(tap):
        return None, 0, f"the session has no tap {tap}"
    first = max(source.session.steps(where.branch).start, where.step - rows)
    blocks: list[NDArray[Any]] = []  # the present step's first
    shape, total, kept = (0, 0), 0, dict[str, None]()  # heads and keys, and the queries so far
    for step, found in source.back_from(tap, where, first):
        sequence = source.sequence(step, where.branch, where.seq)
        new = len(sequence.ids) if sequence is not None else 0
        positions = sequence.positions if sequence is not None and new else ()
        array, part = _spread(found, positions[-1] + 1 if len(positions) else 0)
        if not blocks and (array is None or 0 in array.shape):
            return None, 0, found.note or "not captured"
        shape = shape if array is None or blocks else (array.shape[0], array.shape[2])
        if array is None or array.shape[0] != shape[0]:
            break
        blocks.append(array)
        total += array.shape[1]
        kept |= dict.fromkeys([part] if part else [])
        if array.shape[1] != new:  # what came before in that step is not known
            kept[f"the rows of the last {array.shape[1]} of {new} tokens"] = None
            break
        if total * shape[0] * shape[1] > largest:
            break
    reported = f"kept: {', '.join(kept)}" if kept else ""
    return _stacked(blocks, shape[0], total, shape[1]), shape[1] - total, reported


def _spread(found: Rebuilt, keys: int) -> tuple[NDArray[Any] | None, str]:
    """The rows [heads, queries, keys] with each value at its own key where only the strongest were kept, and that they
    were; the others count as hidden."""
    array = found.array
    if array is None or array.ndim != 3:
        return None, ""
    terms = slices.parse(found.slice)
    kept = terms[2] if len(terms) == 3 else None
    if not isinstance(kept, list) or len(kept) != array.shape[2]:
        return array, ""
    if max(kept, default=0) >= keys:
        return None, ""
    whole = np.full((*array.shape[:2], keys), -np.inf, np.float32)
    whole[:, :, kept] = array
    return whole, f"the {len(kept)} strongest of {keys} keys"


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


def row_figures(row: NDArray[np.floating[Any]]) -> RowFigures:
    """The figures of one row [keys] of probabilities; hidden keys (-inf) count as 0. A row that is not finite has no
    entropy (NaN), and nothing in it is the strongest."""
    values = np.where(np.isneginf(row), 0, row).astype(np.float64)
    finite = np.where(np.isfinite(values), np.maximum(values, 0), 0)
    mass = finite.sum()
    share = finite / mass if mass > 0 else finite
    positive = share[share > 0]
    with np.errstate(invalid="ignore"):  # ∞ - ∞ is NaN, and shown as such
        total = float(values.sum())
    reported = bool(np.isfinite(total)) and row.size > 0
    holding = int(np.searchsorted(np.cumsum(np.sort(share)[::-1]), 0.99)) + 1 if positive.size else 0
    return RowFigures(
        total=total,
        entropy=float(0.0 - (positive * np.log(positive)).sum()) if np.isfinite(total) else math.nan,
        keys=holding if reported else None,
        attended=int(positive.size),
        strongest=int(finite.argmax()) if reported else None,
    )
