"""Cached lengths: what each layer's cache holds on each rank, against what the positions ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TypeVar

from lockstep.sessions.records import SequenceStep

T = TypeVar("T")

_REPORTED, _REPORTED_RANKS = 3, 8


@dataclass(frozen=True, slots=True)
class Odd:
    """Neighbouring layers, `first` to `last`, that hold `rows` of a sequence on `ranks`, where another number
    should be. `whole`: they are all the layers."""

    ranks: tuple[int, ...]
    first: int
    last: int
    rows: int
    whole: bool

    def __str__(self) -> str:
        """ "0 rows in layers 1–3 on rank 1"."""
        layer = f" in layer{'s' * (self.last > self.first)} {span(self.first, self.last)}"
        ranks = ", ".join(map(str, self.ranks[:_REPORTED_RANKS])) + " …" * (len(self.ranks) > _REPORTED_RANKS)
        return (
            f"{self.rows} row{'s' * (self.rows != 1)}{'' if self.whole else layer}"
            f" on rank{'s' * (len(self.ranks) > 1)} {ranks}"
        )


def expected_rows(recorded: SequenceStep) -> int | None:
    """Rows that should be cached after a step whose last token stood where it did; None: no token."""
    return recorded.positions[-1] + 1 if len(recorded.positions) else None


def odd_lengths(recorded: SequenceStep, expected: int | None = None) -> list[Odd]:
    """Where the cache of a sequence does not hold `expected` rows (default: what its positions ask for), by layer."""
    wanted = expected_rows(recorded) if expected is None else expected
    return (
        []
        if wanted is None
        else sorted(_odd(recorded.kv_lens, wanted), key=lambda one: (one.first, one.ranks))
    )


def _odd(kv_lens: Sequence[Sequence[int]], wanted: int) -> Iterator[Odd]:
    alike: dict[tuple[int, ...], list[int]] = {}  # ranks that hold the same are reported together
    for rank, lengths in enumerate(kv_lens):
        alike.setdefault(tuple(lengths), []).append(rank)
    for lengths, ranks in alike.items():
        for first, last, rows in runs(lengths):
            if rows != wanted:
                yield Odd(tuple(ranks), first, last, rows, last - first + 1 == len(lengths))


def runs(values: Sequence[T]) -> list[tuple[int, int, T]]:
    """Neighbours that are equal (layers that hold as many rows, ranks that hold the same in all layers): (first,
    last, value), in order."""
    found, index = [], 0
    for value, run in groupby(values):
        first, index = index, index + len(list(run))
        found.append((first, index - 1, value))
    return found


def span(first: int, last: int) -> str:
    """ "3" or "1–3"."""
    return str(first) if first == last else f"{first}–{last}"


def in_words(odd: Sequence[Odd]) -> str:
    """What is odd, in a clause; the first few, where there are many."""
    return "; ".join(map(str, islice(odd, _REPORTED))) + (
        f"; and {len(odd) - _REPORTED} more" if len(odd) > _REPORTED else ""
    )


def rows_of(kv_lens: Sequence[Sequence[int]], rank: int, layer: int | None) -> int | None:
    """Rows that a layer has cached on a rank; without a layer, those of the layer that has the fewest. None: not
    known."""
    lengths = kv_lens[rank] if rank < len(kv_lens) else ()
    if layer is not None and layer < len(lengths):
        return lengths[layer]
    return min(lengths, default=None)
