"""Which elements of a head a rotation turns together, by which entry of its tables, with which signs.

RoPE (arXiv:2104.09864) as Llama has it turns the pairs (i, i + D/2); GPT-J's turns (2i, 2i + 1). What engines mix up is
which of both their tables are made for, which element is the partner, in which order halves are read and written, and
the signs. All of these are linear in cosine and sine, so that the phase of each pair can be solved for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.head_orders import interleaved
from lockstep.workbench.diagnosis.recording import Array

Indices = NDArray[np.intp]
#: Orders in which the elements of a head are read or written.
_ORDERS = ("", "unzip", "zip", "swap")
_SIGNS = ((-1, 1), (1, -1), (1, 1), (-1, -1))


@dataclass(frozen=True, slots=True)
class Convention:
    """Element j becomes cosine * x[j] cos φ + sign * x[partner of j] sin φ, φ the phase of the pair that `tables` has
    for j. `pairs`: which elements are partners; `read` and `write`: the order of the elements before and after."""

    tables: str = "halves"
    pairs: str = "halves"
    signs: tuple[int, int] = (-1, 1)
    read: str = ""
    write: str = ""
    cosine: int = 1
    exchanged: bool = False  # cosine and sine

    def terms(self, x: Array) -> tuple[Array, Array, Indices]:
        """What cosine and sine are multiplied with, [.., D] each, and which phase each element has."""
        size = x.shape[-1]
        read, write = _order(self.read, size), _order(self.write, size)
        given = x[..., read]
        signs = np.where(_first(self.pairs, size), self.signs[0], self.signs[1])
        a, b = self.cosine * given, signs * given[..., _partner(self.pairs, size)]
        a, b = (b, a) if self.exchanged else (a, b)
        return a[..., write], b[..., write], _table(self.tables, size)[write]

    @property
    def in_pairs(self) -> bool:
        """Whether the right pairs are turned, by the phases of each."""
        return (self.tables, self.pairs, self.read, self.write) == ("halves", "halves", "", "")

    def rotate(self, x: Array, phase: Array) -> Array:
        """x [N, heads, D] by phases [N or 1, heads or 1, D/2]."""
        a, b, table = self.terms(x)
        return np.asarray(a * np.cos(phase)[..., table] + b * np.sin(phase)[..., table])


RIGHT = Convention()
#: What is reported of halves where neighbours are due.
HALVES = "pairs (i, i + D/2) are rotated, not neighbours (2i, 2i + 1)"


def _order(name: str, size: int) -> Indices:
    at = np.arange(size)
    match name:
        case "unzip":
            return np.concatenate([at[::2], at[1::2]])
        case "zip":
            return interleaved(size, 2)
        case "swap":
            return np.roll(at, size // 2)
    return at


def _partner(pairs: str, size: int) -> Indices:
    at = np.arange(size)
    return {"halves": (at + size // 2) % size, "neighbours": at ^ 1, "itself": at}[pairs]


def _first(pairs: str, size: int) -> NDArray[np.bool_]:
    """Which elements are the first of their pair."""
    at = np.arange(size)
    return at % 2 == 0 if pairs == "neighbours" else at < size // 2


def _table(tables: str, size: int) -> Indices:
    at = np.arange(size)
    return at // 2 if tables == "neighbours" else at % (size // 2)


@cache
def conventions(size: int) -> tuple[Convention, ...]:
    """Every one but the right one, those with a name first; of those that do the same to a head of `size` the first."""
    probe = np.arange(1.0, size + 1)
    found: dict[tuple[bytes, ...], Convention] = {}
    for one in (RIGHT, *NAMED, *_all()):
        a, b, table = one.terms(probe)
        found.setdefault((a.tobytes(), b.tobytes(), (table + 0).tobytes()), one)
    return tuple(found.values())[1:]


def _all() -> Iterator[Convention]:
    for tables in ("halves", "neighbours"):
        for pairs in ("halves", "neighbours", "itself"):
            for signs in _SIGNS:
                yield Convention(tables, pairs, signs)
                yield Convention(tables, pairs, signs, exchanged=True)
    for read in _ORDERS:
        for write in _ORDERS:
            for signs in _SIGNS[:2]:
                yield Convention(signs=signs, read=read, write=write)


_INTERLEAVED, _SIGN = "rope_interleaved", "rope_sign"
#: Those that have a name: (name of the cause, in words).
NAMED: Mapping[Convention, tuple[str, str]] = {
    Convention("neighbours", "neighbours"): (
        _INTERLEAVED,
        "pairs (2i, 2i+1) are rotated instead of (i, i + D/2)",
    ),
    Convention(signs=(1, -1)): (
        "rope_reversed",
        "the rotation runs backwards: the sign of the sine is wrong",
    ),
    Convention(exchanged=True): ("rope_cos_sin_exchanged", "cosine and sine are exchanged"),
    Convention(read="unzip"): (
        _INTERLEAVED,
        "pairs (2i, 2i+1) are rotated and written back as halves (i, i + D/2)",
    ),
    Convention(write="zip"): (
        _INTERLEAVED,
        "pairs (i, i + D/2) are rotated and written back as neighbours (2i, 2i+1)",
    ),
    Convention(signs=(1, 1)): (_SIGN, "rotate_half lacks its minus: x1 cos + x2 sin, x2 cos + x1 sin"),
    Convention(signs=(-1, -1)): (
        _SIGN,
        "rotate_half has the minus on both halves: x1 cos - x2 sin, x2 cos - x1 sin",
    ),
    Convention(pairs="itself", signs=(1, 1)): (
        "rope_halves_kept",
        "rotate_half does not exchange the halves: x cos + x sin",
    ),
    Convention(pairs="itself"): (
        "rope_halves_kept",
        "rotate_half does not exchange the halves: x1 cos - x1 sin, x2 cos + x2 sin",
    ),
    Convention(signs=(0, 0)): ("rope_sine_lost", "only the cosine's term is there: x cos"),
    Convention(cosine=0): ("rope_cosine_lost", "only the sine's term is there: rotate_half(x) sin"),
    Convention("neighbours"): (
        "rope_tables_interleaved",
        "the tables repeat each frequency (0, 0, 1, 1, …), the pairs are (i, i + D/2)",
    ),
    Convention(pairs="neighbours"): (
        _INTERLEAVED,
        "pairs (2i, 2i+1) are rotated, with tables made for (i, i + D/2)",
    ),
    Convention(write="swap"): ("rope_halves_swapped", "the two halves are written back in the wrong order"),
}


def in_words(one: Convention) -> tuple[str, str]:
    """The name of the cause, and a sentence."""
    if one in NAMED:
        return NAMED[one]
    reported = [f"{_PAIRS[one.pairs]} are rotated"]
    if one.tables != one.pairs:
        reported.append(f"with tables made for {_PAIRS[one.tables]}")
    if one.signs != RIGHT.signs:
        reported.append(f"with the signs {one.signs[0]:+d} and {one.signs[1]:+d} of the sine")
    if one.exchanged:
        reported.append("with cosine and sine exchanged")
    if one.read:
        reported.append(f"after {_ORDER[one.read]}")
    if one.write:
        reported.append(f"and {_ORDER[one.write]} afterwards")
    return "rope_pairs", ", ".join(reported)


_PAIRS = {
    "halves": "pairs (i, i + D/2)",
    "neighbours": "pairs (2i, 2i+1)",
    "itself": "elements by themselves",
}
_ORDER = {
    "unzip": "neighbours are taken apart into halves",
    "zip": "halves are woven into neighbours",
    "swap": "the halves are exchanged",
}


def in_place(x: Array, phase: Array, first: int) -> Array:
    """The half that is rotated second reads the `first` one as it is after its rotation: written in place."""
    halves = list(np.split(x, 2, axis=-1))
    cos, sin = np.cos(phase), np.sin(phase)
    for one in (first, 1 - first):
        halves[one] = halves[one] * cos + (halves[0] if one else -halves[1]) * sin
    return np.concatenate(halves, axis=-1)
