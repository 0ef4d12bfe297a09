"""At which positions tokens were rotated: fitted token by token from what went in and what came out, and read as the
pattern that an engine's mistake leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.operations.recorded import Row
from lockstep.workbench.diagnosis.operations.rotary_forms import complex_pairs
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.fits import Mask

Integers = NDArray[np.int64]

#: Points a unit of the fastest pair's angle, at which a position is looked for, and the most of them.
_DENSITY, _MOST = 4, 1 << 17
#: Peaks that are refined, and how often: each round narrows the neighbourhood fivefold.
_PEAKS, _ROUNDS = 4, 12


@dataclass(frozen=True, slots=True)
class FittedPositions:
    """Per token [N]: the position, fractional where no whole one fits, and the relative error that is left."""

    at: Array
    left: Array


def fit_positions(
    x: Array, seen: Array, frequencies: Array, right: Array, reach: float, noise: float
) -> FittedPositions:
    """The position [N] by which each token of x [N, heads, D] was rotated to give `seen`, whatever the factor on it, at
    frequencies [N or 1, 1, P].

    Sought within ±`reach`. The right one [N] is taken where it fits within `noise` (relative error), then a whole one.
    """
    z, w = complex_pairs(x), complex_pairs(seen)
    both = np.asarray((w * z.conj()).sum(1))  # [N, P]
    lengths = np.sqrt((np.abs(z) ** 2).sum((1, 2)) * (np.abs(w) ** 2).sum((1, 2)))

    def left(at: Array) -> Array:
        """Relative error of positions [N, K]."""
        turned = np.exp(-1j * at[..., None] * frequencies)
        match = (
            np.einsum("np,nkp->nk", both, turned).real / np.maximum(lengths, np.finfo(float).tiny)[:, None]
        )
        return np.asarray(np.sqrt(np.maximum(2 * (1 - match), 0.0)))

    found = _refined(left, _peaks(both, frequencies, reach), 1 / (_DENSITY * float(frequencies.max())))
    options = np.stack([right, np.round(found), found], axis=1)
    errors = left(options)
    allowed = np.maximum(3 * errors[:, 2:], noise)
    choice = np.argmax(errors <= allowed, axis=1)[:, None]
    return FittedPositions(
        np.take_along_axis(options, choice, 1)[:, 0], np.take_along_axis(errors, choice, 1)[:, 0]
    )


def _peaks(both: NDArray[np.complex128], frequencies: Array, reach: float) -> Array:
    """The best few positions [N, K] of a grid, none beside another."""
    points = int(min(2 * reach * _DENSITY * float(frequencies.max()) + 1, _MOST))
    grid = np.linspace(-reach, reach, points)
    own, which = np.unique(frequencies[:, 0], axis=0, return_inverse=True)
    which = np.broadcast_to(which.reshape(-1), len(both))
    peaks = np.empty((len(both), _PEAKS))
    for number, each in enumerate(own):
        angles = grid[:, None] * each
        cos, sin = np.cos(angles), np.sin(angles)
        for i in np.flatnonzero(which == number):
            peaks[i] = _best(cos @ both[i].real + sin @ both[i].imag, grid)
    return peaks


def _best(match: Array, grid: Array) -> Array:
    inner = np.flatnonzero((match[1:-1] >= match[:-2]) & (match[1:-1] >= match[2:])) + 1
    inner = inner if len(inner) else np.array([int(np.argmax(match))])
    top = inner[np.argsort(match[inner])[::-1][:_PEAKS]]
    return grid[np.resize(top, _PEAKS)]


def _refined(left: Callable[[Array], Array], peaks: Array, width: float) -> Array:
    """The best position [N], from peaks [N, K]."""
    offsets = np.linspace(-1, 1, 11)
    for _ in range(_ROUNDS):
        around = peaks[..., None] + width * offsets  # [N, K, 11]
        errors = left(around.reshape(len(peaks), -1)).reshape(around.shape)
        peaks = np.take_along_axis(around, errors.argmin(-1)[..., None], -1)[..., 0]
        width /= 4
    return np.take_along_axis(peaks, left(peaks).argmin(-1)[:, None], 1)[:, 0]


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Where each of N tokens stands: the step that read it, its sequence, its position there."""

    step: Integers
    seq: Integers
    position: Integers

    @classmethod
    def of(cls, rows: Sequence[Row]) -> TokenPlaces:
        found = np.array([(row.step, row.seq, row.position) for row in rows], dtype=np.int64).reshape(-1, 3)
        return cls(found[:, 0], found[:, 1], found[:, 2])

    def index_in_step(self) -> Integers:
        """Each token's number among those of its sequence in its step."""
        return self._numbered(self.step * (int(self.seq.max()) + 1) + self.seq)

    def index_in_batch(self) -> Integers:
        """Each token's number among all of its step, sequence after sequence."""
        return self._numbered(self.step)

    def _numbered(self, groups: Integers) -> Integers:
        found = np.zeros(len(groups), dtype=np.int64)
        for group in np.unique(groups):
            there = np.flatnonzero(groups == group)
            found[there] = np.arange(len(there))
        return found

    def first_lengths(self) -> Integers:
        """For each token how many tokens the first step read of its sequence."""
        first = self.step == self.step.min()
        return np.array([int((first & (self.seq == seq)).sum()) for seq in self.seq], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PositionPattern:
    """A rule that gives wrong positions, [N]. `fitted` are its parameters."""

    name: str
    text: str
    at: Array
    fitted: dict[str, object]


def patterns(places: TokenPlaces, found: Array, wrong: Mask, within: float) -> Iterator[PositionPattern]:
    """The rules that give the positions `found` [N] at the tokens that are `wrong`, each to `within` a position."""
    for pattern in _candidates(places, _whole(found, within), wrong):
        if (np.abs(pattern.at - found)[wrong] <= within).all() and (
            np.abs(pattern.at - places.position)[wrong] > 0
        ).all():
            yield pattern


def _candidates(places: TokenPlaces, found: Array, wrong: Mask) -> Iterator[PositionPattern]:
    right = places.position.astype(np.float64)
    off, used = (found - right)[wrong], found[wrong]
    yield from _constant(places, right, used, wrong)
    by = float(np.round(np.median(off), 6))
    if by:
        text = f"tokens stand {_count(by)} too {'far' if by > 0 else 'early'}"
        yield PositionPattern("position_offset", text, right + by, {"offset": by})
    several = len(np.unique(places.seq)) > 1
    index = places.index_in_step().astype(np.float64)
    if (index[wrong] > 0).any():
        text = "positions start again at 0 in every step: what is cached is not counted"
        yield PositionPattern("positions_restart", text, index, {"restart": "step"})
    if several:
        batch = places.index_in_batch().astype(np.float64)
        text = "positions are counted through the packed batch, across sequences"
        yield PositionPattern("positions_of_batch", text, batch, {"count": "batch"})
        yield from _of_sequences(places, right, found, wrong)
    steps = places.step - int(places.step.min())
    if steps[wrong].any():
        each = float(np.round(np.median(off / np.maximum(steps[wrong], 1)), 6))
        if each and len(np.unique(steps[wrong])) > 1:
            text = (
                f"each step counts {_count(abs(each))} too {'many' if each > 0 else 'few'}: the error grows"
            )
            yield PositionPattern("positions_drift", text, right + each * steps, {"per_step": each})
    yield from _scaled(right, off, used, wrong)
    yield from _reversed(places, right, wrong)
    yield from _rounded(right)


def _whole(found: Array, within: float) -> Array:
    """Positions with halves and whole numbers where they are these to `within`."""
    near = np.round(2 * found) / 2
    return np.where(np.abs(near - found) <= within, near, found)


def _constant(places: TokenPlaces, right: Array, used: Array, wrong: Mask) -> Iterator[PositionPattern]:
    """One position for all."""
    at = float(np.round(np.median(used), 6))
    last = places.first_lengths() - 1.0
    decode = bool((places.step[wrong] > places.step.min()).all())
    past = bool((wrong == (right > at)).all()) and at > 0
    if past and not (decode and np.array_equal(np.unique(last), [at])):
        text = f"positions beyond {at:g} are taken for {at:g}: the table of angles ends there"
        yield PositionPattern("positions_clamped", text, np.minimum(right, at), {"last": at})
    elif decode and len(np.unique(right[wrong])) >= 1 and at == 0:
        text = "decode tokens are rotated as if they stood at position 0"
        yield PositionPattern("position_stuck", text, np.zeros_like(right), {"position": 0.0})
    elif len(np.unique(right[wrong])) > 1:
        yield PositionPattern("position_stuck", f"all tokens are rotated as if they stood at position {at:g}",
                              np.full_like(right, at), {"position": at})  # fmt: skip
    if decode:
        text = "decode tokens are all rotated as the prompt's last token: the position is not advanced"
        yield PositionPattern("position_stuck", text, np.where(places.step > places.step.min(), last, right),
                              {"position": "end of prompt"})  # fmt: skip


def _of_sequences(places: TokenPlaces, right: Array, found: Array, wrong: Mask) -> Iterator[PositionPattern]:
    """Positions that mix up a batch's sequences, or shift each by its own number."""
    lengths = places.first_lengths()
    padding = lengths.max() - lengths
    text = "each sequence stands as far too far as its prompt is shorter than the longest: padded positions are counted"
    yield PositionPattern("positions_padded", text, right + padding, {"padding": "prompt"})
    index = places.index_in_step()
    for other in np.unique(places.seq):
        at = right.copy()
        for n in np.flatnonzero(wrong):
            same = (places.step == places.step[n]) & (places.seq == other) & (index == index[n])
            if same.any():
                at[n] = right[np.flatnonzero(same)[0]]
        text = f"tokens are rotated by the positions of sequence {other}"
        yield PositionPattern("positions_of_other_sequence", text, at, {"sequence": int(other)})
    at, by = right.copy(), {}
    for seq in np.unique(places.seq[wrong]):
        mine = places.seq == seq
        by[str(seq)] = float(np.round(np.median((found - right)[mine & wrong]), 6))
        at[mine] += by[str(seq)]
    if len(set(by.values())) > 1:
        words = ", ".join(f"{value:+g} in sequence {seq}" for seq, value in by.items())
        yield PositionPattern(
            "position_offset", f"positions are shifted by sequence: {words}", at, {"offsets": by}
        )


def _scaled(right: Array, off: Array, used: Array, wrong: Mask) -> Iterator[PositionPattern]:
    here = right[wrong]
    if not here.any():
        return
    by = float(here @ used / (here @ here))
    simple = round(by) if by >= 1 else 1 / round(1 / by) if by > 0 else 0.0
    by = simple if simple and abs(simple / by - 1) < 1e-3 else by
    if by > 0 and len(np.unique(here)) > 1:
        words = f"multiplied by {by:g}" if by >= 1 else f"divided by {1 / by:g}"
        yield PositionPattern("positions_scaled", f"positions are {words}", right * by, {"factor": by})
    wrap = -off[off < 0]
    if len(wrap) == len(off) and (size := float(np.round(wrap.min()))) > 1:
        text = f"positions start again at 0 after every {size:g} tokens"
        yield PositionPattern("positions_restart", text, right % size, {"restart": size})


def _reversed(places: TokenPlaces, right: Array, wrong: Mask) -> Iterator[PositionPattern]:
    """Each step's positions of each sequence from the last to the first."""
    at = right.copy()
    for step, seq in {(int(places.step[n]), int(places.seq[n])) for n in np.flatnonzero(wrong)}:
        mine = (places.step == step) & (places.seq == seq)
        at[mine] = right[mine][::-1]
    text = "positions run backwards, from the last to the first"
    yield PositionPattern("positions_reversed", text, at, {"order": "reversed"})


def _rounded(right: Array) -> Iterator[PositionPattern]:
    for dtype, digits in (("bfloat16", 8), ("float16", 11)):
        scale = 2.0 ** (np.floor(np.log2(np.maximum(right, 1))) - digits + 1)
        at = np.round(right / scale) * scale  # numpy rounds halves to even, as the dtypes do
        if (at != right).any():
            text = f"positions are rounded to {dtype}: neighbouring tokens share one"
            yield PositionPattern("positions_rounded", text, at, {"dtype": dtype})


def _count(by: float) -> str:
    return f"{abs(by):g} position{'s' * (abs(by) != 1)}"
