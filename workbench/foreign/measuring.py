"""Statistics and likeliest tokens of a step, from its tensors, as our own engine and references compute them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.taps import parts
from lockstep.engine.taps.names import local_name
from lockstep.sessions.dtypes import widen
from lockstep.sessions.errors import LayoutError
from lockstep.sessions.layouts import rebuild_records
from lockstep.sessions.meta import PASS_STATISTICS, ROW_STATISTICS
from lockstep.sessions.records import STATISTICS, SequenceStep, Tap, TensorRecord
from lockstep.sessions.replicas import replica_groups
from lockstep.workbench.foreign.shapes import ATTENTION

#: How many of the largest logits a step keeps by themselves.
TOP_K = 20


def statistics(
    taps: Sequence[Tap], ranks: int, tensors: Iterable[TensorRecord]
) -> tuple[NDArray[np.float32], NDArray[np.uint64] | None]:
    """Statistics [taps, ranks, STATISTICS] and checksums [taps, ranks] of a step; no checksums where a tap left
    statistics alone, which are of its rows then."""
    held: dict[tuple[int, str], list[TensorRecord]] = {}
    for one in tensors:
        held.setdefault((one.rank, one.tap), []).append(one)
    stats = np.full((len(taps), ranks, len(STATISTICS)), np.nan, np.float32)
    checksums = np.zeros((len(taps), ranks), np.uint64)
    for tap in taps:
        for rank in range(ranks):
            if found := held.get((rank, tap.name)):
                stats[tap.index, rank], checksums[tap.index, rank] = _measured(tap.name, found)
    only = False
    for tap in taps:
        for rank in range(ranks):
            rows = [
                x
                for ending in (ROW_STATISTICS, PASS_STATISTICS)
                for x in held.get((rank, tap.name + ending), ())
            ]
            if rows:
                stats[tap.index, rank] = _merged(np.concatenate([one.array for one in rows]))
                only = True
        _alike(tap.layout, checksums[tap.index], [rank for rank in range(ranks) if (rank, tap.name) in held])
    return stats, None if only else checksums


def _alike(layout: str, checksums: NDArray[np.uint64], seen: Sequence[int]) -> None:
    """A rank that left nothing of a tap, as of logits that one rank gathers, is not said to differ from its replicas:
    it has their checksum."""
    for group in replica_groups(layout, len(checksums)):
        known = [rank for rank in group if rank in seen]
        for rank in set(group) - set(known) if known else ():
            checksums[rank] = checksums[known[0]]


def _measured(tap: str, records: Sequence[TensorRecord]) -> tuple[NDArray[np.float32], int]:
    """Statistics and checksum of a tap over all sequences of a step, as the engine has them: rows together, attention
    by sequence, without the cells that a mask has put to -inf."""
    dtype = records[0].dtype
    arrays = [one.array for one in records]
    if local_name(tap) not in ATTENTION and len({one.shape[1:] for one in arrays}) == 1:
        arrays = [np.concatenate(arrays)]
    values = [_values(one, dtype) for one in arrays]
    masked = [int(np.isneginf(one).sum()) if tap.endswith("scores") else 0 for one in values]
    found = parts.unmask(np.stack([parts.measured(one) for one in values]), masked)
    sums = np.array([parts.checksum(_bits(one, dtype)) for one in arrays], np.uint64)
    whole = parts.merge(found) if len(found) > 1 else found[0]
    return parts.statistics(whole[None])[0], int(sums[0]) if len(sums) == 1 else parts.chained(sums)


def _values(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The numbers, as floats."""
    array = widen(array, dtype)
    return array if array.dtype.kind == "f" else array.astype(np.float64)


def _bits(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """What a checksum is of: the numbers as they lie there, whole numbers as float64."""
    return array if array.dtype.kind == "f" or dtype == "bfloat16" else array.astype(np.float64)


def _merged(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Statistics of rows of equal length -> those of the whole. (Of a pass that each of its rows has: the same, counts
    aside, which such dumps have none of.)"""
    low, high, mean, rms, absmax, nan, inf, zeros = rows.astype(np.float64).T
    whole = [
        low.min(),
        high.max(),
        mean.mean(),
        np.sqrt(np.mean(rms**2)),
        absmax.max(),
        nan.sum(),
        inf.sum(),
        zeros.sum(),
    ]
    return np.array(whole, np.float32)


def likeliest(
    told: SequenceStep, logits: Mapping[int, TensorRecord], layout: str, ranks: int
) -> SequenceStep:
    """`told` with the largest logits and their normaliser, from what each rank holds of its logits [1, vocab]. Where no
    later step tells what it emitted, that is the likeliest token."""
    try:
        found = rebuild_records(layout, logits, ranks).array if logits else None
    except LayoutError:
        found = None
    if found is None or found.size == 0:
        return told
    row = found.reshape(-1).astype(np.float64)
    top = np.argsort(-row, kind="stable")[:TOP_K]  # of equals the lowest id
    largest = float(row[top[0]])
    if not np.isfinite(largest):
        return replace(told, topk_ids=top.tolist(), topk_logits=row[top].tolist())
    shifted = row - largest
    total = float(np.log(np.nansum(np.exp(shifted))))
    logs = shifted - total
    with np.errstate(invalid="ignore"):
        entropy = float(-np.nansum(np.exp(logs) * logs))
    return replace(
        told,
        emitted=int(top[0]) if told.emitted is None else told.emitted,
        topk_ids=top.tolist(),
        topk_logits=row[top].tolist(),
        logsumexp=largest + total,
        entropy=entropy,
    )
