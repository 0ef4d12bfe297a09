"""How the results of attention over parts of the keys are joined wrongly, by what each part has of the exponentials.

Every form multiplies the probabilities of a part's keys with one number a head and query.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.recording import Array

#: The number of the part [K] that each key belongs to.
Parts = NDArray[np.int64]
#: The parts of so many keys, of which so many are new in this pass.
Split = Callable[[int, int], Parts]

#: Sizes of blocks, numbers of parts, and lengths of a prefix that are tried.
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512)
_COUNTS = (2, 3, 4, 8, 16)
_PREFIX = 64


@dataclass(frozen=True, eq=False)
class Shares:
    """What each of n parts has of the right probabilities [heads, T, K]; all are [heads, T, n]."""

    probs: Array
    parts: Parts

    @cached_property
    def members(self) -> NDArray[np.bool_]:
        """Which keys belong to which part, [n, K]."""
        return np.asarray(self.parts == np.arange(int(self.parts.max()) + 1)[:, None])

    @cached_property
    def mass(self) -> Array:
        """The probability of each part: its sum of exponentials, over that of all."""
        return np.asarray(self.probs @ self.members.T)

    @cached_property
    def top(self) -> Array:
        """The largest probability: the exponential of a part's maximum, over the sum of all."""
        return np.stack([self.probs.max(-1, initial=0.0, where=own) for own in self.members], axis=-1)

    @cached_property
    def running(self) -> Array:
        """The same of a part and all before it."""
        return np.maximum.accumulate(self.top, axis=-1)

    @cached_property
    def size(self) -> Array:
        """How many keys are seen."""
        return np.asarray((self.probs > 0) @ self.members.T.astype(np.float64))

    @property
    def seen(self) -> Array:
        return (self.mass > 0).astype(np.float64)

    @cached_property
    def last(self) -> Array:
        """1 for the newest part that is seen."""
        n = self.mass.shape[-1]
        newest = n - 1 - np.argmax(self.mass[..., ::-1] > 0, axis=-1)
        return np.asarray((np.arange(n) == newest[..., None]).astype(np.float64))

    @cached_property
    def first(self) -> Array:
        return np.asarray((np.arange(self.mass.shape[-1]) == np.argmax(self.mass > 0, -1)[..., None]) * 1.0)

    @property
    def several(self) -> NDArray[np.bool_]:
        """Whether a query sees more than one part, [heads, T, 1]."""
        return np.asarray((self.mass > 0).sum(-1, keepdims=True) > 1)

    def neighbour(self, weights: Array) -> Array:
        """The weights of the part before; the first part has those of the last one that is seen."""
        newest = (weights * self.last).sum(-1, keepdims=True)
        return np.where(self.first > 0, newest, np.roll(weights, 1, axis=-1)) * self.seen

    def of_keys(self, factors: Array) -> Array:
        """Probabilities [heads, T, K] of which each part's are multiplied."""
        return np.where(self.probs > 0, self.probs * factors[..., self.parts], 0.0)


def _over(x: Array, y: Array) -> Array:
    """Their quotient; 0 where y is 0."""
    return np.divide(x, y, out=np.zeros(np.broadcast_shapes(x.shape, y.shape)), where=y > 0)


def _joined(s: Shares, weights: Array) -> Array:
    """Each part's own result, by weights that are made to add up to 1."""
    return _over(_over(weights, weights.sum(-1, keepdims=True)), s.mass)


def _less(s: Shares, gone: Array) -> Array:
    """1 for the parts that are left, all where a query sees one alone."""
    return np.where(s.several, 1 - gone, 1.0)


_BASE = "the weights of parts are made of the logarithm of the sum of exponentials, {} on one side, {} on the other"

#: The factors [heads, T, n] on the probabilities of each part.
Form = Callable[[Shares], Array]
#: (words, form)
FORMS: tuple[tuple[str, Form], ...] = (
    ("each part's result, divided by its own sum, counts the same", lambda s: _joined(s, s.seen)),
    ("the parts' results, each divided by its own sum, are added up", lambda s: _over(s.seen, s.mass)),
    ("the newest part alone counts, divided by its own sum", lambda s: _joined(s, s.last)),
    ("the newest part is left out", lambda s: _less(s, s.last)),
    ("the newest part is left out, the others are divided by their own sum",
     lambda s: _joined(s, s.mass * _less(s, s.last))),
    ("the first part alone counts, divided by its own sum", lambda s: _joined(s, s.first)),
    ("only the first part is added up", lambda s: s.first),
    ("the first part is left out", lambda s: _less(s, s.first)),
    ("the first part is left out, the others are divided by their own sum",
     lambda s: _joined(s, s.mass * _less(s, s.first))),
    ("the newest part counts twice", lambda s: _joined(s, s.mass * (1 + s.last * s.several))),
    ("the newest part is added twice, but counts once in the sum", lambda s: 1 + s.last * s.several),
    ("the first part counts twice", lambda s: _joined(s, s.mass * (1 + s.first * s.several))),
    ("the first part is added twice, but counts once in the sum", lambda s: 1 + s.first * s.several),
    ("parts are weighted by their sums of exponentials, each taken below its own maximum: the maxima are left out",
     lambda s: _joined(s, _over(s.mass, s.top))),
    ("parts are weighted by the exponentials of their maxima: the sums are left out",
     lambda s: _joined(s, s.top)),
    (_BASE.format("to base 2", "as natural"), lambda s: _joined(s, s.mass ** math.log2(math.e))),
    (_BASE.format("natural", "to base 2"), lambda s: _joined(s, s.mass ** math.log(2))),
    ("parts are weighted by the square of their sums: the weight is applied twice",
     lambda s: _joined(s, s.mass**2)),
    ("parts are weighted by how many keys they have", lambda s: _joined(s, s.size)),
    ("each part is weighted by the sum of another: that of the part before it",
     lambda s: _joined(s, s.neighbour(s.mass))),
    ("the weights of parts are assigned in the reverse order", lambda s: _joined(s, _reversed(s))),
    ("what was added up before is not rescaled when the running maximum grows, the sum is",
     lambda s: _over(s.top.max(-1, keepdims=True) * s.seen, s.running)),
    ("neither the sum nor what was added up before is rescaled when the running maximum grows",
     lambda s: _joined(s, _unscaled(s))),
)  # fmt: skip

#: Those by which all parts are right among each other, and divided by another sum.
DENOMINATORS: tuple[tuple[str, Form], ...] = (
    ("the sum of the newest part alone is divided by",
     lambda s: s.seen * _over(np.ones(1), (s.mass * s.last).sum(-1, keepdims=True))),
    ("the sum of the first part alone is divided by",
     lambda s: s.seen * _over(np.ones(1), (s.mass * s.first).sum(-1, keepdims=True))),
    ("the sum is not rescaled when the running maximum grows, what was added up is",
     lambda s: s.seen * _over(np.ones(1), _unscaled(s).sum(-1, keepdims=True))),
)  # fmt: skip


def _unscaled(s: Shares) -> Array:
    """The sums of parts as they were when the maximum was that of the parts so far."""
    return _over(s.mass * s.top.max(-1, keepdims=True), s.running)


def _reversed(s: Shares) -> Array:
    """The weights of the seen parts, from the last to the first."""
    count = (s.mass > 0).sum(-1, keepdims=True)
    index = np.clip(count - 1 - np.arange(s.mass.shape[-1]), 0, None)
    return np.take_along_axis(s.mass, index, -1) * s.seen


def splits(most: int) -> Iterator[tuple[str, Split]]:
    """Ways to cut up to `most` keys, in words."""
    for size in (size for size in _SIZES if size < most):
        yield f"in blocks of {size}", partial(_blocks, size)
    for count in (count for count in _COUNTS if count <= most):
        yield f"in {count} parts (the last has the rest)", partial(_equal, count)
        yield f"in {count} parts (the last is the shortest)", partial(_chunks, count)
        yield f"in {count} parts (taking keys in turn)", partial(_in_turn, count)
    yield "in two parts (those of earlier steps and of this one)", _cached_and_new
    for first in range(1, min(_PREFIX, most - 1) + 1):
        yield f"in two parts (the first {first} and the rest)", partial(_first, first)
        yield f"in two parts (the newest {first} and the rest)", partial(_newest, first)


def _blocks(size: int, keys: int, _new: int) -> Parts:
    return np.arange(keys) // size


def _equal(count: int, keys: int, _new: int) -> Parts:
    return np.minimum(np.arange(keys) // max(keys // count, 1), count - 1)


def _chunks(count: int, keys: int, _new: int) -> Parts:
    return np.arange(keys) // -(-keys // count)


def _in_turn(count: int, keys: int, _new: int) -> Parts:
    return np.arange(keys) % count


def _cached_and_new(keys: int, new: int) -> Parts:
    return np.asarray((np.arange(keys) >= keys - new) & (new < keys), dtype=np.int64)


def _first(count: int, keys: int, _new: int) -> Parts:
    return np.asarray(np.arange(keys) >= count, dtype=np.int64)


def _newest(count: int, keys: int, _new: int) -> Parts:
    return np.asarray(np.arange(keys) >= keys - count, dtype=np.int64)
