"""Statistics and likeliest tokens of a step, from its tensors, as our own engine and references compute them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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

#: Elements of arrays of equal size that are measured together.
_TOGETHER = 1 << 20
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
    places = [(tap, rank) for tap in taps for rank in range(ranks) if (rank, tap.name) in held]
    pieces = [_pieces(tap.name, held[rank, tap.name]) for tap, rank in places]
    where = ([tap.index for tap, _ in places], [rank for _, rank in places])
    stats[where], checksums[where] = _measured(pieces)
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
    """A rank that left nothing of a tap, as of logits that one rank gathers, is not shown to differ from its replicas:
    it has their checksum."""
    for group in replica_groups(layout, len(checksums)):
        known = [rank for rank in group if rank in seen]
        for rank in set(group) - set(known) if known else ():
            checksums[rank] = checksums[known[0]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Numbers of a tap that are measured in one. `masked`: cells that a mask has put to -inf."""

    array: NDArray[Any]
    dtype: str
    masked: int


def _pieces(tap: str, records: Sequence[TensorRecord]) -> list[_Piece]:
    """A tap over all sequences of a step as the engine measures it: rows together, attention by sequence."""
    dtype = records[0].dtype
    arrays = [one.array for one in records]
    if len(arrays) > 1 and local_name(tap) not in ATTENTION and len({one.shape[1:] for one in arrays}) == 1:
        arrays = [np.concatenate(arrays)]
    scores = tap.endswith("scores")
    return [
        _Piece(one, dtype, int(np.isneginf(_values(one, dtype)).sum()) if scores else 0) for one in arrays
    ]


def _measured(taps: Sequence[Sequence[_Piece]]) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
    """Statistics [n, STATISTICS] and checksums [n] of n taps. Arrays of equal size are measured together: an engine may
    have tens of thousands of small ones."""
    pieces = [piece for tap in taps for piece in tap]
    found, sums = np.zeros((len(pieces), len(parts.PARTS))), np.zeros(len(pieces), np.uint64)
    alike: dict[tuple[int, str, str], list[int]] = {}
    for index, one in enumerate(pieces):
        alike.setdefault((one.array.size, one.array.dtype.str, one.dtype), []).append(index)
    for (size, _, dtype), all_of_them in alike.items():
        count = max(1, _TOGETHER // max(1, size))
        for start in range(0, len(all_of_them), count):
            some = all_of_them[start : start + count]
            rows = np.stack([pieces[index].array.reshape(-1) for index in some])
            found[some], sums[some] = (
                parts.measured(_values(rows, dtype)),
                parts.checksums(_bits(rows, dtype)),
            )
    found = parts.unmask(found, [one.masked for one in pieces])
    if len(pieces) > len(taps):
        ends = np.cumsum([len(tap) for tap in taps])
        by_tap = [slice(end - len(tap), end) for tap, end in zip(taps, ends.tolist(), strict=True)]
        sums = np.array([_chained(sums[one]) for one in by_tap], np.uint64)
        found = np.stack([parts.merge(found[one]) for one in by_tap])
    return parts.statistics(found), sums


def _chained(sums: NDArray[np.uint64]) -> int:
    return int(sums[0]) if len(sums) == 1 else parts.chained(sums)


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
    step: SequenceStep, logits: Mapping[int, TensorRecord], layout: str, ranks: int
) -> SequenceStep:
    """`step` with the largest logits and their normaliser, from what each rank holds of its logits [1, vocab]. Where no
    later step shows what it emitted, that is the likeliest token."""
    try:
        found = rebuild_records(layout, logits, ranks).array if logits else None
    except LayoutError:
        found = None
    if found is None or found.size == 0:
        return step
    row = found.reshape(-1).astype(np.float64)
    top = np.argsort(-row, kind="stable")[:TOP_K]  # of equals the lowest id
    largest = float(row[top[0]])
    if not np.isfinite(largest):
        return replace(step, topk_ids=top.tolist(), topk_logits=row[top].tolist())
    shifted = row - largest
    total = float(np.log(np.nansum(np.exp(shifted))))
    logs = shifted - total
    with np.errstate(invalid="ignore"):
        entropy = float(-np.nansum(np.exp(logs) * logs))
    return replace(
        step,
        emitted=int(top[0]) if step.emitted is None else step.emitted,
        topk_ids=top.tolist(),
        topk_logits=row[top].tolist(),
        logsumexp=largest + total,
        entropy=entropy,
    )
