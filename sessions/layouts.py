"""The tensor that one rank alone would have had, from the tensors that all ranks had.

    replicate               the same bits on every rank
    shard(D)                concatenate along dimension D in rank order; shards may be uneven
    shard(D,replicas=R)     groups of R neighbouring ranks hold the same shard
    shard(D,groups=G)       each of G groups of neighbouring ranks holds the shards of a tensor: the sum of those
                            (experts divided among groups of ranks: each has the rows of its own, zeros elsewhere)
    partial                 the sum over the ranks

(PyTorch DTensor's placements; `replicas` is Megatron's duplication of KV heads when tp exceeds them.)
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.dtypes import widen
from lockstep.sessions.errors import LayoutError
from lockstep.sessions.records import TensorRecord

_SHARD = re.compile(r"shard\((\d{1,2})(?:,replicas=(\d{1,4}))?(?:,groups=(\d{1,4}))?\)")


@dataclass(frozen=True, slots=True)
class Layout:
    """A parsed layout string; `str()` gives it back."""

    kind: Literal["replicate", "shard", "partial"]
    dim: int = 0
    replicas: int = 1
    groups: int = 1

    def __str__(self) -> str:
        if self.kind != "shard":
            return self.kind
        more = {"replicas": self.replicas, "groups": self.groups}
        return f"shard({self.dim}{''.join(f',{name}={count}' for name, count in more.items() if count > 1)})"


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A global tensor. `array` is None when the ranks that answered do not suffice (`missing_ranks`).

    `disagreeing_ranks` differ, bit for bit, from the replicas they should equal: from the majority, or from
    the lowest rank when there is none. `note` describes both for people, "" when there is neither.
    `slice` is the part of the whole that was captured ("" = whole).
    """

    array: NDArray[Any] | None
    disagreeing_ranks: tuple[int, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    note: str = ""
    slice: str = ""


@lru_cache(256)
def parse(text: str) -> Layout:
    """The layout that `text` names. `LayoutError` on anything else."""
    if text == "replicate":
        return Layout("replicate")
    if text == "partial":
        return Layout("partial")
    match = _SHARD.fullmatch(text)
    if match is None or (replicas := int(match[2] or 1)) < 1 or (groups := int(match[3] or 1)) < 1:
        raise LayoutError(
            f"{text[:60]!r} is no layout; use replicate, partial, shard(DIM), shard(DIM,replicas=N) or "
            "shard(DIM,groups=N)"
        )
    return Layout("shard", int(match[1]), replicas, groups)


def rebuild(
    layout: Layout | str, arrays_by_rank: Mapping[int, NDArray[Any]], ranks: int | None = None, part: str = ""
) -> Rebuilt:
    """The global tensor of `arrays_by_rank` (bfloat16 widened) among `ranks` ranks (default: those given), or the same
    `part` of it (a slice).

    Partial sums are taken in float64 and returned as float32. `LayoutError`, with the shapes, when they
    cannot be parts of one tensor.
    """
    layout = parse(layout) if isinstance(layout, str) else layout
    ranks = max(arrays_by_rank, default=-1) + 1 if ranks is None else ranks
    missing = tuple(rank for rank in range(ranks) if rank not in arrays_by_rank)
    if layout.kind == "partial":
        return _sum(arrays_by_rank, missing, part)
    groups = [range(ranks)] if layout.kind == "replicate" else shard_groups(layout, ranks)
    shards, disagreeing = [], []
    for group in groups:
        held = {rank: arrays_by_rank[rank] for rank in group if rank in arrays_by_rank}
        if held:
            chosen, odd = agree(held)
            shards.append(held[chosen])
            disagreeing += odd
    note = _note(disagreeing, missing)
    if len(shards) < len(groups):
        return Rebuilt(None, tuple(disagreeing), missing, note, part)
    array = shards[0] if layout.kind == "replicate" else _together(layout, shards, arrays_by_rank)
    return Rebuilt(array, tuple(disagreeing), missing, note, part)


def rebuild_records(layout: Layout | str, records: Mapping[int, TensorRecord], ranks: int) -> Rebuilt:
    """`rebuild` from what each rank captured. Only parts cut alike go together: those like the lowest rank's."""
    part = records[min(records)].slice if records else ""
    # Replicas that are one array stay one: then nothing is compared.
    wide = {id(one.array): widen(one.array, one.dtype) for one in records.values()}
    arrays = {rank: wide[id(one.array)] for rank, one in records.items() if one.slice == part}
    return rebuild(layout, arrays, ranks, part)


def rebuilt_shape(
    layout: Layout | str, shapes_by_rank: Mapping[int, tuple[int, ...]], ranks: int
) -> tuple[int, ...] | None:
    """The shape of what `rebuild` gives of tensors of these shapes and one dtype; None where ranks are missing.
    `LayoutError` as there."""
    if len(shapes_by_rank) < ranks:
        return None
    # One value behind each shape: nothing is read but by a concatenation.
    held = {shape: np.broadcast_to(np.float32(0), shape) for shape in set(shapes_by_rank.values())}
    array = rebuild(layout, {rank: held[shape] for rank, shape in shapes_by_rank.items()}, ranks).array
    return None if array is None else array.shape


def shard_groups(layout: Layout, ranks: int) -> list[range]:
    """The ranks that hold each distinct shard, in shard order, group by group."""
    if ranks % (layout.replicas * layout.groups):
        raise LayoutError(
            f"{layout} does not fit {ranks} ranks: they do not divide into groups of {layout.replicas * layout.groups}"
        )
    return [range(first, first + layout.replicas) for first in range(0, ranks, layout.replicas)]


def agree(held: Mapping[int, NDArray[Any]]) -> tuple[int, list[int]]:
    """The rank that speaks for the majority (the lowest of them), and the ranks whose bits differ from it."""
    if len({id(array) for array in held.values()}) == 1:
        return min(held), []
    camps: dict[Hashable, list[int]] = {}
    for rank, array in sorted(held.items()):
        digest = blake2b(_bytes(array).data).digest()
        camps.setdefault((array.dtype, array.shape, digest), []).append(rank)
    majority = max(camps.values(), key=len)  # the first, which holds the lowest rank, on a tie
    return majority[0], sorted(rank for camp in camps.values() if camp is not majority for rank in camp)


def sizes(layout: Layout, arrays_by_rank: Mapping[int, NDArray[Any]], ranks: int) -> list[int]:
    """The length of each distinct shard along the sharded dimension, from the ranks that hold them."""
    found = []
    for group in shard_groups(layout, ranks):
        shapes = [arrays_by_rank[rank].shape for rank in group if rank in arrays_by_rank]
        if any(len(shape) <= layout.dim for shape in shapes):
            raise LayoutError(f"no dimension {layout.dim} to shard in shapes {shapes}")
        lengths = {shape[layout.dim] for shape in shapes}
        if len(lengths) != 1:
            raise LayoutError(
                f"ranks {group.start} to {group.stop - 1} hold shards of lengths {sorted(lengths)}"
            )
        found.append(lengths.pop())
    return found


def cut(
    layout: Layout | str, array: NDArray[Any], ranks: int, sizes: Sequence[int] | None = None
) -> dict[int, NDArray[Any]]:
    """Each rank's part (a view) of a global tensor: the inverse of `rebuild` but for partial layouts.

    `sizes` are the lengths of the distinct shards, equal by default. Of several groups each gets the whole.
    """
    layout = parse(layout) if isinstance(layout, str) else layout
    if layout.kind == "partial":
        raise LayoutError("a sum does not determine its summands: a partial tensor cannot be cut")
    if layout.kind == "replicate":
        return dict.fromkeys(range(ranks), array)
    groups = shard_groups(layout, ranks)
    length, count = array.shape[layout.dim] if layout.dim < array.ndim else -1, len(groups) // layout.groups
    if sizes is None and length >= 0 and length % count == 0:
        sizes = [length // count] * len(groups)
    each = [] if sizes is None else [sizes[i : i + count] for i in range(0, len(sizes), count)]
    if len(each) != layout.groups or any(len(one) != count or sum(one) != length for one in each):
        raise LayoutError(
            f"shape {array.shape} cannot be cut by {layout} into {len(groups)} shards of {sizes}"
        )
    parts = [part for one in each for part in np.split(array, np.cumsum(one)[:-1], axis=layout.dim)]
    return {rank: part for group, part in zip(groups, parts, strict=True) for rank in group}


def _together(
    layout: Layout, shards: list[NDArray[Any]], arrays_by_rank: Mapping[int, NDArray[Any]]
) -> NDArray[Any]:
    """Each group's shards side by side, and the groups' sum: zeros where another group has something."""
    count = len(shards) // layout.groups
    wholes = [
        _concatenate(layout, shards[i : i + count], arrays_by_rank) for i in range(0, len(shards), count)
    ]
    if len({whole.shape for whole in wholes}) > 1:
        raise LayoutError(f"groups of different shapes: {_shapes(arrays_by_rank)}")
    with np.errstate(over="ignore", invalid="ignore"):
        return reduce(np.add, wholes)


def _concatenate(
    layout: Layout, shards: list[NDArray[Any]], arrays_by_rank: Mapping[int, NDArray[Any]]
) -> NDArray[Any]:
    rests = {(s.dtype, s.shape[: layout.dim], s.shape[layout.dim + 1 :]) for s in shards}
    if len(rests) != 1 or any(s.ndim <= layout.dim for s in shards):
        raise LayoutError(f"no tensor has these parts under {layout}: {_shapes(arrays_by_rank)}")
    return np.concatenate(shards, axis=layout.dim) if len(shards) > 1 else shards[0]


def _sum(arrays_by_rank: Mapping[int, NDArray[Any]], missing: tuple[int, ...], part: str) -> Rebuilt:
    if len({a.shape for a in arrays_by_rank.values()}) > 1:
        raise LayoutError(f"summands of different shapes: {_shapes(arrays_by_rank)}")
    if missing or not arrays_by_rank:
        return Rebuilt(None, (), missing, _note([], missing), part)
    with np.errstate(over="ignore", invalid="ignore"):  # inf - inf is NaN, as it would be on the ranks
        total = reduce(np.add, (array.astype(np.float64) for _, array in sorted(arrays_by_rank.items())))
        return Rebuilt(total.astype(np.float32), slice=part)


def _note(disagreeing: Sequence[int], missing: Sequence[int]) -> str:
    words = []
    if disagreeing:
        words.append(f"{_ranks(disagreeing)} differ{'s' * (len(disagreeing) == 1)} from the other replicas")
    if missing:
        words.append(f"nothing captured on {_ranks(missing)}")
    return "; ".join(words)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _shapes(arrays_by_rank: Mapping[int, NDArray[Any]]) -> str:
    return ", ".join(f"rank {r} {a.dtype}{a.shape}" for r, a in sorted(arrays_by_rank.items()))


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
