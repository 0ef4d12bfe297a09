"""What a layer's heads attend to: every query that was captured, gathered up to one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sessions import Session, SessionError
from workbench.views.words import mapping

#: The largest matrix of one layer that is put together, in elements.
_LARGEST = 32_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """One head: its place, and of its last query the sum, the entropy in nats and how many keys hold 99 %."""

    head: int
    rank: int
    kv_head: int
    total: float
    entropy: float
    keys: int
    values: NDArray[np.float32]  # [queries, keys]
    known: NDArray[
        np.bool_
    ]  # [queries, keys]: False for a key after its query that got nothing, as it should


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """One layer up to `step`. Row i of a head is the query at position `first_query + i`. `missing` says why there
    are no heads."""

    layer: int
    step: int
    seq: int
    first_query: int
    heads: tuple[Head, ...]
    missing: str = ""


def attention(
    session: Session, branch: int, step: int, seq: int, layer: int, head: int | None, rows: int
) -> Attention:
    """The layer's probabilities; `head` None: of all heads. At most `rows` steps before are gathered in."""
    tap = f"layers.{layer}.attn.probs"
    gathered, missing = _gather(session, branch, step, seq, tap, rows)
    if gathered is None:
        return Attention(layer, step, seq, 0, (), missing)
    count, queries, keys = gathered.shape
    if head is not None and not 0 <= head < count:
        return Attention(layer, step, seq, 0, (), f"there is no head {head}: the layer has {count}")
    kv_heads = mapping(session.meta.get("model")).get("num_kv_heads")
    kv = kv_heads if isinstance(kv_heads, int) and 0 < kv_heads <= count else count
    first = keys - queries
    chosen = range(count) if head is None else (head,)
    return Attention(
        layer, step, seq, first,
        tuple(_head(gathered[h], h, h * session.ranks // count, h * kv // count, first) for h in chosen),
    )  # fmt: skip


def _head(values: NDArray[np.float32], head: int, rank: int, kv_head: int, first: int) -> Head:
    queries, keys = values.shape
    last = values[-1].astype(np.float64)
    share = np.where(np.isfinite(last), np.maximum(last, 0), 0)
    share = share / share.sum() if share.sum() > 0 else share
    positive = share[share > 0]
    held = int(np.searchsorted(np.cumsum(np.sort(share)[::-1]), 0.99) + 1) if positive.size else 0
    later = np.arange(keys)[None, :] > np.arange(first, first + queries)[:, None]
    return Head(
        head, rank, kv_head, float(last.sum()), float(-(positive * np.log(positive)).sum()), held,
        values, ~(later & (values == 0)),
    )  # fmt: skip


def _gather(
    session: Session, branch: int, step: int, seq: int, tap: str, rows: int
) -> tuple[NDArray[np.float32] | None, str]:
    """[heads, queries, keys] up to the step, or why there is none."""
    if not session.has_tap(tap):
        return None, f"the session has no tap {tap}"
    found: list[NDArray[np.float32]] = []
    size = 0
    for at in range(step, max(-1, step - rows), -1):
        try:
            rebuilt = session.rebuilt(tap, step=at, seq=seq, branch=branch)
        except SessionError as error:
            return None, str(error)
        part = rebuilt.array
        if part is None or part.ndim != 3 or 0 in part.shape:
            if not found:
                return None, rebuilt.note or "not captured"
            break
        if not found:
            keys, heads = part.shape[2], part.shape[0]
        if part.shape[0] != heads or part.shape[2] > keys:
            break
        padded = np.zeros((heads, part.shape[1], keys), np.float32)  # later keys did not exist yet
        padded[:, :, : part.shape[2]] = part
        found.append(padded)
        size += padded.size
        if size > _LARGEST or (rebuilt.slice and _read(session, branch, at, seq) > 1):
            break  # a cut row is the last of its step: where that read more, earlier rows are not known
    return np.concatenate(found[::-1], axis=1), ""


def _read(session: Session, branch: int, step: int, seq: int) -> int:
    """How many tokens the sequence read at the step."""
    return sum(len(told.ids) for told in session.step(step, branch).sequences if told.seq == seq)
