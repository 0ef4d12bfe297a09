"""What the passes of all ranks read, merged: who ran what, before any tensor is placed.

Ranks of one engine make the same passes in the same order, so the n-th pass of each is the same one; what went in has
to be equal. A rank that wrote fewer has died: the passes that all have are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions import layouts
from lockstep.sessions.dtypes import widen
from lockstep.sessions.errors import LayoutError
from lockstep.sessions.meta import PASS_STATISTICS, ROW_HASHES, ROW_STATISTICS
from lockstep.workbench.foreign.accesses import CacheAccesses
from lockstep.workbench.foreign.passes import (
    ForeignDumpError,
    ForeignPass,
    ForeignRun,
    ForeignTensor,
    checked_ranks,
)

#: One pass, as each rank wrote it.
RankPasses = Mapping[int, ForeignPass]


@dataclass(frozen=True, slots=True)
class PassHead:
    """What one pass read, as all ranks report it, and what its tensors show of its rows.

    `tops` are the tokens of the largest logits, one for each row whose logits were seen; `top_rows` those rows, None
    where the dump does not show them. `blank`: every row of every tensor is the same, or all is zero, as in a pass that
    warms an engine up. `cache`: where the first rank's rows lie. `given_places` and `greedy`: as in `ForeignPass`.
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    requests: tuple[str, ...] | None
    tops: tuple[int, ...]
    top_rows: tuple[int, ...] | None
    blank: bool
    cache: CacheAccesses | None = None
    given_places: tuple[int, ...] | None = None
    greedy: frozenset[str] | None = None

    @property
    def places(self) -> tuple[int, ...]:
        """How many tokens each row has before it in its request: by its position, where nothing else gives it."""
        return self.positions if self.given_places is None or self.requests is None else self.given_places

    @property
    def runs(self) -> int:
        """Into how many stretches of consecutive positions the rows fall: at most as many as there are requests."""
        return sum(row == 0 or at != self.positions[row - 1] + 1 for row, at in enumerate(self.positions))

    def chosen(self, names: Sequence[str]) -> dict[int, int]:
        """By row the token that its logits chose, `names` being the request of each row."""
        rows = self.top_rows or placed_rows(self.positions, names, len(self.tops))
        return {} if rows is None else dict(zip(rows, self.tops, strict=True))


@dataclass(frozen=True, slots=True)
class MergedPasses:
    """`ranks` are those that wrote passes, of `expected`; `cut` counts what each rank wrote beyond the passes that all
    have."""

    heads: tuple[PassHead, ...]
    ranks: tuple[int, ...]
    expected: int
    cut: Mapping[int, int]


def merged_passes(run: ForeignRun, look: Callable[[RankPasses], None]) -> MergedPasses:
    """Read what all ranks read, and let `look` see every pass of the run. ForeignDumpError where there is nothing, or
    ranks contradict each other."""
    expected = checked_ranks(run.facts.ranks, str(run.folder))
    heads: list[PassHead] = []
    written = dict.fromkeys(range(expected), 0)
    readers = {rank: iter(run.passes(rank)) for rank in range(expected)}
    going = dict(readers)
    ranks: tuple[int, ...] = ()
    while going:
        found = _next(going)
        for rank in found:
            written[rank] += 1
        if not heads:
            ranks = tuple(sorted(found))
        if found and len(found) == len(ranks):
            heads.append(_head(found))
            if not heads[-1].blank:
                look(found)
    if not heads:
        raise ForeignDumpError(
            f"{run.folder}: no rank wrote a pass that was finished; record at least one (with lockstep_tap it begins "
            "with tape.step(ids, positions))"
        )
    cut = {rank: more for rank in ranks if (more := written[rank] - len(heads))}
    return MergedPasses(tuple(heads), ranks, expected, cut)


def common_passes(run: ForeignRun, merged: MergedPasses) -> Iterator[RankPasses]:
    """The same passes once more, with their tensors."""
    readers = [run.passes(rank) for rank in merged.ranks]
    for _, *found in zip(merged.heads, *readers, strict=False):
        yield dict(zip(merged.ranks, found, strict=True))


def _next(going: dict[int, Iterator[ForeignPass]]) -> dict[int, ForeignPass]:
    """The next pass of each rank; a rank that has none is done."""
    found = {}
    for rank, passes in list(going.items()):
        one = next(passes, None)
        if one is None:
            del going[rank]
        else:
            found[rank] = replace(one, tensors=list(one.tensors))  # each is read once
    return found


def _head(found: RankPasses) -> PassHead:
    first = found[min(found)]
    count = len(first.ids)
    for rank, one in found.items():
        where = f"rank {rank}, pass {one.index}"
        if len(one.positions) != count or (one.requests is not None and len(one.requests) != count):
            raise ForeignDumpError(f"{where}: {len(one.ids)} ids, but {len(one.positions)} positions")
        if (
            min((*one.ids, *one.positions, *(one.places or ())), default=0) < 0
            or max((*one.ids, *one.positions, *(one.places or ())), default=0) >= 1 << 31
        ):
            raise ForeignDumpError(f"{where}: an id or a position that is none (below 0, or 2³¹ and above)")
        for what, mine, theirs in (
            ("ids", one.ids, first.ids),
            ("positions", one.positions, first.positions),
            ("places", one.places or (), first.places or ()),
        ):
            if mine != theirs:
                raise ForeignDumpError(
                    f"{where}: read other {what} ({list(mine)[:6]}…) than rank {first.rank} did in its pass "
                    f"{first.index} ({list(theirs)[:6]}…): the ranks' dumps are not of one run, or one lost a pass"
                )
    dummy = count > 0 and len(set(first.ids)) == 1 and not any(first.positions)
    return PassHead(
        first.ids,
        first.positions,
        first.requests,
        *_tops(found),
        dummy and all(_is_blank(tensor) for one in found.values() for tensor in one.tensors),
        first.cache,
        first.places,
        first.greedy,
    )


def placed_rows(positions: Sequence[int], names: Sequence[str], count: int) -> tuple[int, ...] | None:
    """Which rows of a pass `count` rows of a tensor are: all, or the last of each request (without those of padding
    that nobody named); None where that cannot be determined."""
    if count == len(names):
        return tuple(range(count))
    last = sorted({name: row for row, name in enumerate(names) if name}.values())
    if len(last) > count:
        last = [row for row in last if positions[row]] or last
    return tuple(last) if len(last) == count else None


def without_array(tensor: ForeignTensor, one: ForeignPass) -> dict[str, NDArray[Any]]:
    """What a tensor that left no array left of its rows, by the ending of the tap that holds it."""
    found: dict[str, NDArray[Any]] = {}
    if tensor.array is None and (reported := tensor.statistics) is not None:
        whole = len(reported) == 1 and tensor.rows is None and len(one.ids) > 1
        found[PASS_STATISTICS if whole else ROW_STATISTICS] = (
            np.repeat(reported, len(one.ids), 0) if whole else reported
        )
    if tensor.array is None and tensor.hashes is not None:
        found[ROW_HASHES] = tensor.hashes.astype(np.uint64).reshape(-1, 1)
    return found


def tensor_rows(tensor: ForeignTensor) -> int:
    """How many rows a tensor has."""
    for found in (tensor.array, tensor.hashes, tensor.statistics):
        if found is not None:
            return len(found) if found.ndim else 0
    return 0


def _tops(found: RankPasses) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The token with the largest logit of each row, from all ranks' logits, and the rows where they are reported."""
    seen = {
        rank: tensor for rank, each in found.items() for tensor in each.tensors
        if tensor.tap == "logits" and tensor.array is not None and tensor.array.ndim > 1
    }  # fmt: skip
    if not seen:
        return (), None
    reported = seen[min(seen)]
    arrays = {rank: _widened(tensor) for rank, tensor in seen.items()}
    equal = len(layouts.agree(arrays)[1]) == 0
    try:
        logits = layouts.rebuild(reported.layout or ("replicate" if equal else "shard(1)"), arrays).array
    except LayoutError:
        return (), None
    if (
        logits is None
        or logits.size == 0
        or (reported.rows is not None and len(reported.rows) != len(logits))
    ):
        return (), None
    return tuple(logits.reshape(len(logits), -1).argmax(axis=1).tolist()), reported.rows


def _widened(tensor: ForeignTensor) -> NDArray[Any]:
    assert tensor.array is not None
    return widen(tensor.array, tensor.dtype)


def _is_blank(tensor: ForeignTensor) -> bool:
    """Whether all rows are bit-equal, where there are several, or all is zero."""
    if tensor.array is not None:
        rows = np.ascontiguousarray(tensor.array)
        several = len(rows) > 1 if rows.ndim else False
        return not rows.any() or (several and bool((rows == rows[:1]).all()))
    if tensor.hashes is not None and len(tensor.hashes) > 1:
        return len(set(tensor.hashes.tolist())) == 1
    return tensor.statistics is None or not tensor.statistics[:, 4].any()
