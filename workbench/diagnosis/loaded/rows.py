"""Rows of the checkpoint's matrices by their bits: which row, of which parameter, a row in memory is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lockstep.engine.checkpoint.source import Source
from lockstep.engine.parallel.shards import Span
from lockstep.workbench.diagnosis.loaded.places import Shape

#: Bytes of a number -> an integer of as many.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Rows that are read at a time.
BLOCK = 1 << 13
#: Rows that are looked up before all are: of numbers that are nowhere, these are enough.
_FIRST = 64


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows `rows` in memory are those of `parameter` from `first` on, in `columns`."""

    rows: Span
    parameter: str
    first: int
    columns: Span

    @property
    def origin(self) -> tuple[str, Span]:
        """Of which parameter, in which columns."""
        return self.parameter, self.columns


@dataclass(slots=True)
class RowTable:
    """All rows of `parameters` that are `width` numbers wide, whole or as one of at most `size` equal parts of wider
    ones, in a dtype."""

    source: Source
    shapes: dict[str, Shape]
    width: int
    dtype: torch.dtype
    size: int
    _origins: list[tuple[str, Span]] = field(default_factory=list)
    _keys: Tensor = field(init=False)
    _places: Tensor = field(init=False)

    def __post_init__(self) -> None:
        keys, places = [], []
        for name, shape in self.shapes.items():
            if len(shape) != 2 or shape[1] % self.width or shape[1] // self.width > self.size:
                continue
            for start in range(0, shape[1], self.width):
                columns = Span(start, start + self.width)
                found = torch.cat(list(self._keys_of(name, shape[0], columns)))
                places.append(
                    torch.stack([torch.full_like(found, len(self._origins)), torch.arange(len(found))])
                )
                self._origins.append((name, columns))
                keys.append(found)
        self._keys, order = (torch.cat(keys) if keys else torch.empty(0, dtype=torch.int64)).sort(stable=True)
        self._places = (torch.cat(places, 1) if places else torch.empty(2, 0, dtype=torch.int64))[:, order]

    def _keys_of(self, name: str, rows: int, columns: Span) -> Iterator[Tensor]:
        for start in range(0, rows, BLOCK):
            block = self.source.read(name, 0, Span(start, min(rows, start + BLOCK)))
            yield row_keys(block[:, columns.start : columns.stop].to(self.dtype))

    def find(self, x: Tensor, nearest: str) -> list[RowRun]:
        """Where the rows of x [n, width] are in the checkpoint, as runs of rows that follow each other there; none
        where one of them is nowhere. Of several that are equal, those of the parameter `nearest`."""
        if not len(self._keys) or self._places_of(row_keys(x[:_FIRST])) is None:
            return []
        keys = row_keys(x)
        if (first := self._places_of(keys)) is None:
            return []
        runs: list[RowRun] = []
        for i, (key, at) in enumerate(zip(keys.tolist(), first.tolist(), strict=True)):
            found = self._equal(key, at)
            last = runs[-1] if runs else None
            if (
                last is not None
                and last.rows.stop == i
                and (*last.origin, last.first + last.rows.size) in found
            ):
                runs[-1] = replace(last, rows=Span(last.rows.start, i + 1))
            else:
                name, columns, row = min(found, key=lambda one: one[0] != nearest)
                runs.append(RowRun(Span(i, i + 1), name, row, columns))
        return runs

    def _places_of(self, keys: Tensor) -> Tensor | None:
        """The first place of each key in the table; None where one has none."""
        first = torch.searchsorted(self._keys, keys)
        there = self._keys[first.clamp_max(len(self._keys) - 1)] == keys
        return first if bool(there.all()) else None

    def _equal(self, key: int, at: int) -> list[tuple[str, Span, int]]:
        """All rows with this key, which at most some have: rows of zeros may be many."""
        found: list[tuple[str, Span, int]] = []
        while at < len(self._keys) and int(self._keys[at]) == key and len(found) < 64:
            origin, row = self._places[:, at].tolist()
            found.append((*self._origins[origin], row))
            at += 1
        return found


def row_keys(rows: Tensor) -> Tensor:
    """[n, m] -> [n] int64: equal where all bits of a row are."""
    raw = rows.contiguous().view(_WORDS[rows.element_size()]).to(torch.int64)
    generator = torch.Generator().manual_seed(0x5EED)
    factors = torch.randint(-(1 << 62), 1 << 62, (raw.shape[1],), generator=generator)
    return (raw * factors).sum(1)


def as_spans(rows: Sequence[int]) -> list[Span]:
    """Ascending numbers as runs."""
    spans: list[Span] = []
    for row in rows:
        if spans and spans[-1].stop == row:
            spans[-1] = Span(spans[-1].start, row + 1)
        else:
            spans.append(Span(row, row + 1))
    return spans
