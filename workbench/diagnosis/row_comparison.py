"""Two recordings row by row: which operation has equal inputs and an unequal output, and how far apart they are.

    found = compare_rows(RowSide(before), RowSide(after))

Rows are matched by (sequence, position), tensors rebuilt by layout where the ranks differ. Two runs of one engine on
one machine should be equal bit for bit; others differ by rounding, for which there is a tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.taps.flow import inputs_of, is_known, remembers
from lockstep.engine.taps.names import count_layers, layer_of, local_name
from lockstep.sessions.dtypes import rounded
from lockstep.sessions.metrics import Metrics, coarser, metrics
from lockstep.workbench.diagnosis.row_sides import Kind, RowSide, paired

#: (sequence of the first recording, position)
Place = tuple[int, int]
#: Taps that are computed from all earlier rows of these, of their layer.
_REMEMBERS = ("attn.scores", "attn.probs", "attn.context")
#: Taps that are computed from several others, all of them.
_TERMS = {"attn_residual": 2, "mlp_residual": 2, "mlp.act": 2, "attn.scores": 2, "attn.context": 2}
_REMEMBERED = ("attn.k_rope", "attn.k_norm", "attn.k_proj", "attn.v_proj")


@dataclass(frozen=True, slots=True)
class TapRows:
    """One tap over all rows that both have. `differing` of its `rows` are not equal, the first at `first`; in `own` of
    those, which are `own_rows`, everything that it is computed from is, the first at `first_own`. `equal_bits` is the
    share of elements that are equal bit for bit; `kl` the mean KL(second || first) of the distributions (of logits).
    Metrics are None where hashes or statistics alone were recorded (`kind`)."""

    tap: str
    kind: Kind
    rows: int
    differing: int
    first: Place | None
    own: int
    first_own: Place | None
    equal_bits: float | None = None
    metrics: Metrics | None = None
    pcc: float | None = None
    nmse: float | None = None
    kl: float | None = None
    own_rows: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class RowComparison:
    """`rows` were matched in `sequences`; `only_first` and `only_second` are taps without a counterpart, `different`
    those that cannot be compared, with the reason; at `parted` sequences go on with other tokens."""

    rows: int
    sequences: int
    taps: tuple[TapRows, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    different: tuple[tuple[str, str], ...]
    parted: tuple[Place, ...] = ()

    @property
    def differing(self) -> tuple[TapRows, ...]:
        return tuple(one for one in self.taps if one.differing)

    @property
    def by_statistics_alone(self) -> bool:
        """Whether nothing shows that the bits are equal."""
        return bool(self.taps) and all(one.kind == "statistics" for one in self.taps)

    @property
    def first(self) -> TapRows | None:
        """The first operation with equal inputs and an unequal output."""
        return next((one for one in self.taps if one.own), None)


@dataclass(slots=True)
class _Unequal:
    """By tap, which rows differ; and which of all taps before the one that is asked for."""

    taps: dict[str, set[Place]] = field(default_factory=dict)
    before: set[Place] = field(default_factory=set)
    layers: int = 0

    def inherited(self, tap: str, places: Sequence[Place]) -> set[Place]:
        """The rows at which something that the tap is computed from differs; where not all of that is known, anything
        before it."""
        inputs = [name for name in self._inputs(tap) if name in self.taps]
        known = len(inputs) >= _TERMS.get(local_name(tap), 1)
        found = set().union(*(self.taps[name] for name in inputs)) if known else set(self.before)
        if local_name(tap) in _REMEMBERS or not known:
            prefix = "" if layer_of(tap) is None else f"layers.{layer_of(tap)}."
            found |= self._after_unequal([prefix + name for name in _REMEMBERED], places)
        elif remembers(tap):  # a convolution and a state: all rows before
            found |= self._after_unequal(inputs, places)
        return found

    def _inputs(self, tap: str) -> tuple[str, ...]:
        if not is_known(tap):
            return ()
        fused = ("attn.q_rope", "attn.k_rope", "attn.v_proj") if local_name(tap) in _REMEMBERS else ()
        prefix = f"layers.{layer_of(tap)}."
        return (*inputs_of(tap, self.layers, self.taps), *(prefix + name for name in fused))

    def _after_unequal(self, names: Sequence[str], places: Sequence[Place]) -> set[Place]:
        """Rows after one at which one of these taps differs."""
        first: dict[int, int] = {}
        for name in names:
            for seq, position in self.taps.get(name, ()):
                first[seq] = min(position, first.get(seq, position))
        return {(seq, position) for seq, position in places if position >= first.get(seq, position + 1)}


def compare_rows(a: RowSide, b: RowSide, tolerance: float = 0.0) -> RowComparison:
    """Every tap that both recorded rows of. A row differs where its relative L2 error is above `tolerance`, or, without
    one, in any bit; of statistics alone, where one of them moved by more than that share of the row's largest."""
    pairs = paired(a, b)
    theirs = set(b.taps)
    both = [tap for tap in a.taps if tap in theirs]
    unequal, compared, different = _Unequal(layers=count_layers(both)), [], []
    for tap in both:
        kinds = [kind for kind in _KINDS if kind in a.kinds(tap) & b.kinds(tap)]
        if not kinds:
            different.append((tap, "one has its numbers, the other hashes or statistics of them"))
            continue
        rows = _rows(a, b, tap, kinds[0], pairs)
        if kinds[0] == "hashes" and tolerance and "statistics" in kinds and not _all_equal(rows):
            kinds = ["statistics"]  # another hash may be no more than another rounding
            rows = _rows(a, b, tap, "statistics", pairs)
        if not rows.places:
            different.append((tap, "no row of it fits together in both"))
            continue
        one, wrong = _compared(tap, kinds[0], rows, unequal, coarser(_dtype(a), _dtype(b)), tolerance)
        compared.append(one)
        unequal.taps[tap] = wrong
        unequal.before |= wrong
    mine = set(a.taps)
    return RowComparison(
        sum(len(positions) for *_, positions in pairs),
        len(pairs),
        tuple(compared),
        tuple(tap for tap in a.taps if tap not in theirs),
        tuple(tap for tap in b.taps if tap not in mine),
        tuple(different),
        tuple(parted(a, b, pairs)),
    )


_KINDS: tuple[Kind, ...] = ("tensor", "hashes", "statistics")


def parted(a: RowSide, b: RowSide, pairs: Sequence[tuple[int, int, list[int]]]) -> Iterator[Place]:
    """Where sequences go on with other tokens."""
    for seq, other, positions in pairs:
        after = positions[-1] + 1
        if after in a.sequences[seq] and after in b.sequences[other]:
            yield seq, after


_Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows that both have in one shape, flattened."""

    places: list[Place] = field(default_factory=list)
    left: list[_Array] = field(default_factory=list)
    right: list[_Array] = field(default_factory=list)


def _rows(a: RowSide, b: RowSide, tap: str, kind: Kind, pairs: Sequence[tuple[int, int, list[int]]]) -> _Rows:
    found = _Rows()
    for seq, other, positions in pairs:
        mine, theirs = a.rows(tap, kind, seq, positions), b.rows(tap, kind, other, positions)
        for position in positions:
            if position in mine and position in theirs and mine[position].size == theirs[position].size:
                found.places.append((seq, position))
                found.left.append(mine[position].reshape(-1))
                found.right.append(theirs[position].reshape(-1))
    return found


def _all_equal(rows: _Rows) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(rows.left, rows.right, strict=True))


def _compared(
    tap: str, kind: Kind, rows: _Rows, unequal: _Unequal, dtype: str, tolerance: float
) -> tuple[TapRows, set[Place]]:
    pairs = list(zip(rows.left, rows.right, strict=True))
    equal = [_equal(x, y, kind, dtype) for x, y in pairs]
    same = [
        bool(bits.all()) or _within(x, y, kind, tolerance) for bits, (x, y) in zip(equal, pairs, strict=True)
    ]
    wrong = [place for place, well in zip(rows.places, same, strict=True) if not well]
    inherited = unequal.inherited(tap, rows.places)
    own = [place for place in wrong if place not in inherited]
    first, first_own = (min(found, key=lambda p: (p[1], p[0]), default=None) for found in (wrong, own))
    count = len(rows.places)
    one = TapRows(tap, kind, count, len(wrong), first, len(own), first_own, own_rows=tuple(own))
    if kind == "tensor":
        one = _measured(
            one, np.concatenate(rows.left), np.concatenate(rows.right), np.concatenate(equal), dtype
        )
        if tap == "logits":
            one = replace(one, kl=float(np.mean([_kl(x, y) for x, y in pairs])))
    return one, set(wrong)


def _within(x: _Array, y: _Array, kind: Kind, tolerance: float) -> bool:
    """Whether a row that is not equal is within the tolerance."""
    if not tolerance or kind == "hashes":
        return False
    wide, right = x.astype(np.float64), y.astype(np.float64)
    if not (np.isfinite(wide) == np.isfinite(right)).all():
        return False
    finite = np.isfinite(wide)
    wide, right = wide[finite], right[finite]
    if kind == "tensor":
        return bool(np.linalg.norm(wide - right) <= tolerance * np.linalg.norm(right))
    return bool(np.abs(wide - right).max(initial=0.0) <= tolerance * np.abs(right).max(initial=0.0))


def _dtype(side: RowSide) -> str:
    return side.session.meta.config.dtype or "float32"


def _equal(x: _Array, y: _Array, kind: Kind, dtype: str) -> NDArray[np.bool_]:
    """Which elements are equal bit for bit, in the coarser type of the two."""
    if kind == "hashes":
        return np.asarray(x == y)
    if kind == "tensor" and x.dtype.kind == y.dtype.kind == "f":
        x, y = (np.ascontiguousarray(rounded(side, dtype)) for side in (x, y))
    bits = np.uint64 if x.dtype.itemsize == 8 else np.uint32
    if x.dtype.itemsize not in (4, 8) or x.dtype != y.dtype:
        return np.asarray(x == y)
    return np.asarray(np.ascontiguousarray(x).view(bits) == np.ascontiguousarray(y).view(bits))


def _measured(one: TapRows, x: _Array, y: _Array, equal: NDArray[np.bool_], dtype: str) -> TapRows:
    found = metrics(x, y, dtype)
    finite = np.isfinite(x) & np.isfinite(y)
    p, q = x[finite].astype(np.float64), y[finite].astype(np.float64)
    spread = float(np.std(p) * np.std(q)) if p.size else 0.0
    pcc = float(np.mean((p - p.mean()) * (q - q.mean())) / spread) if spread > 0 else math.nan
    return replace(one, equal_bits=float(equal.mean()), metrics=found, pcc=pcc, nmse=found.rel_l2**2)


def _kl(x: _Array, y: _Array) -> float:
    """Of the second's distribution from the first's, KL(second || first), in nats."""
    p, q = (side.astype(np.float64) - np.logaddexp.reduce(side.astype(np.float64)) for side in (y, x))
    with np.errstate(all="ignore"):
        return float(np.sum(np.where(np.exp(p) > 0, np.exp(p) * (p - q), 0.0)))
