"""The rows of one pass as a dump gives them: packed one after the other, or a batch of equally long lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.foreign.passes import ForeignDumpError, ForeignPass, ForeignTensor
from lockstep.workbench.foreign.readers.modules import Named


@dataclass(frozen=True, slots=True)
class PassRows:
    """What went into one pass. Tensors have the axes `lead` in place of the rows: [T] packed, [B, T] as lines; of the
    packed rows the first `len(ids)` are tokens, the rest padding. `last` are the rows that logits are taken of, and
    `requests` as in `ForeignPass`."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    requests: tuple[str, ...] | None
    lead: tuple[int, ...]
    last: tuple[int, ...]

    @classmethod
    def packed(
        cls, ids: Sequence[int], positions: Sequence[int], lengths: Sequence[int], names: Sequence[str] = ()
    ) -> PassRows:
        """Rows of requests that are `lengths` long after the pass; `names`, where the dump has them, are theirs."""
        counts = request_rows(positions, lengths)
        rows = sum(counts)
        reported = (
            tuple(name for name, count in zip(names, counts, strict=True) for _ in range(count))
            if names
            else None
        )
        last = tuple(stop - 1 for stop in accumulate(counts))
        return cls(tuple(ids[:rows]), tuple(positions[:rows]), reported, (len(ids),), last)

    @classmethod
    def rows(cls, ids: NDArray[np.integer], positions: NDArray[np.integer]) -> PassRows:
        """Rows of which nothing more is reported."""
        reported = tuple(ids.tolist())
        return cls(reported, tuple(positions.tolist()), None, (len(reported),), ())

    @classmethod
    def lines(
        cls, ids: NDArray[np.integer], positions: NDArray[np.integer] | None, mask: NDArray[Any] | None
    ) -> PassRows:
        """A batch [B, T], a request a line. `mask` [B, cached + T] is 0 at padding; without `positions` [B or 1, T]
        a line's tokens are counted, as transformers does."""
        lines, count = ids.shape
        real = np.ones(ids.shape, bool) if mask is None else mask[:, mask.shape[1] - count :].astype(bool)
        if real.shape != ids.shape or (
            positions is not None and (positions.ndim != 2 or positions.shape[1] != count)
        ):
            raise ForeignDumpError(f"{lines} × {count} ids do not fit their mask or their positions")
        if positions is None:
            cached = 0 if mask is None else mask[:, : mask.shape[1] - count].sum(axis=1, keepdims=True)
            positions = np.maximum(cached + np.cumsum(real, axis=1) - 1, 0)
        at = np.where(real, np.broadcast_to(positions, ids.shape), 0)
        names = tuple(f"line {line}" if one else "" for line in range(lines) for one in real[line])
        last = tuple(line * count + count - 1 for line in range(lines))
        return cls(tuple(ids.ravel().tolist()), tuple(at.ravel().tolist()), names, (lines, count), last)

    def in_batch(self, batch: int) -> PassRows:
        """The same, with the requests of lines named after their batch: the next one has the same lines."""
        named = (
            None if self.requests is None else tuple(one and f"batch {batch} {one}" for one in self.requests)
        )
        return replace(self, requests=named)

    def passed(self, rank: int, index: int, tensors: Sequence[ForeignTensor]) -> ForeignPass:
        return ForeignPass(rank, index, self.ids, self.positions, self.requests, tensors)

    def tensors(self, named: Sequence[Named], dtype: str) -> list[ForeignTensor]:
        """Those of the tensors that have a row a token."""
        found = (self.tensor(one, dtype) for one in named)
        return [one for one in found if one is not None]

    def tensor(self, named: Named, dtype: str) -> ForeignTensor | None:
        """A tensor with a row a token; None for one that has no such axis."""
        x, rows = named.array, None
        count = int(np.prod(self.lead))
        if x.ndim > len(self.lead) and x.shape[: len(self.lead)] == self.lead:
            x = x.reshape(count, *x.shape[len(self.lead) :])[: len(self.ids)]
        elif len(self.lead) == 1 and x.ndim == 2 and x.shape[0] > count > 0 and x.shape[0] % count == 0:
            heads = x.shape[0] // count  # q_norm sees [T * heads, head_dim]
            x = x.reshape(count, heads, x.shape[1])[: len(self.ids)]
        elif (
            named.tap == "logits"
            and self.requests is None
            and not self.last
            and x.ndim == 2
            and len(x) < count
        ):
            pass  # the last row of each request, whichever they are
        elif (
            self.last
            and len(x.shape) > 1
            and len(x) == len(self.last)
            and x.shape[1 : len(self.lead)] in ((), (1,))
        ):
            x, rows = x.reshape(len(x), *x.shape[len(self.lead) :]), self.last
        else:
            return None
        return ForeignTensor(named.tap, named.layout, dtype, x, rows)


def request_rows(positions: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """How many rows each request has in a pass after which it is `lengths` long; rows past the last are padding.

    ForeignDumpError where positions and lengths do not fit.
    """
    counts, start = [], 0
    for length in lengths:
        stop = start + 1
        while (
            stop < len(positions)
            and positions[stop - 1] < length - 1
            and positions[stop] == positions[stop - 1] + 1
        ):
            stop += 1
        if start >= len(positions) or positions[stop - 1] != length - 1:
            raise ForeignDumpError(
                f"a request is {length} tokens long, but has no row at position {length - 1}: speculative decoding and "
                "attention that is split over data-parallel ranks cannot be imported; switch them off"
            )
        counts.append(stop - start)
        start = stop
    return counts


def whole_numbers(array: NDArray[Any], where: str) -> NDArray[np.int64]:
    """Ids, positions or lengths. ForeignDumpError for anything else."""
    if not np.issubdtype(array.dtype, np.integer):
        raise ForeignDumpError(f"{where}: ids, positions and lengths are whole numbers, not {array.dtype}")
    return array.astype(np.int64)
