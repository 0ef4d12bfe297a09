"""The rotation of q and k, right, and in the forms in which engines get it wrong: on arrays, without positions.

A form takes x [N, heads, D] and the angles [N, 1 or heads, D/2] of its pairs, with the attention factor on cosine and
sine, and gives the rotated [N, heads, D]. Models here rotate the pairs (i, i + D/2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import rotate
from lockstep.workbench.diagnosis.recording import Array

Complex = NDArray[np.complex128]
Rotate = Callable[[Array, Array, float], Array]


def complex_pairs(x: Array) -> Complex:
    """[…, D] -> […, D/2]: the pair (i, i + D/2) that half-split RoPE rotates, as one number."""
    half = x.shape[-1] // 2
    return np.asarray(x[..., :half] + 1j * x[..., half:])


def joined(z: Complex) -> Array:
    """The inverse of `complex_pairs`."""
    return np.concatenate([z.real, z.imag], axis=-1)


def rotate_by(x: Array, cos: Array, sin: Array) -> Array:
    """The right rotation with given tables, each [N, 1 or heads, D/2] or one entry an element, [.., D]."""
    if cos.shape[-1] * 2 == x.shape[-1]:
        cos, sin = np.concatenate([cos, cos], -1), np.concatenate([sin, sin], -1)
    half = x.shape[-1] // 2
    return np.asarray(x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin)


def _interleaved(x: Array, angles: Array, factor: float) -> Array:
    return _zip(rotate(_unzip(x), angles, factor))


def _unzip(x: Array) -> Array:
    """(0, 1, 2, 3, …) -> (0, 2, …, 1, 3, …)."""
    return np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


def _zip(x: Array) -> Array:
    half = x.shape[-1] // 2
    return np.stack([x[..., :half], x[..., half:]], axis=-1).reshape(x.shape)


def _terms(cos: float, first: float, second: float) -> Rotate:
    """cos * x1 cos + first * x2 sin, cos * x2 cos + second * x1 sin."""

    def turned(x: Array, angles: Array, factor: float) -> Array:
        half = x.shape[-1] // 2
        crossed = np.concatenate([first * x[..., half:], second * x[..., :half]], axis=-1)
        both = np.concatenate([angles, angles], axis=-1)
        return np.asarray((cos * x * np.cos(both) + crossed * np.sin(both)) * factor)

    return turned


def _exchanged(x: Array, angles: Array, factor: float) -> Array:
    return rotate_by(x, np.sin(angles) * factor, np.cos(angles) * factor)


def _pairs_tables(x: Array, angles: Array, factor: float) -> Array:
    """Pairs (i, i + D/2), element j with the angle of pair j // 2."""
    own = angles.repeat(2, axis=-1)
    return rotate_by(x, np.cos(own) * factor, np.sin(own) * factor)


def _halves_tables(x: Array, angles: Array, factor: float) -> Array:
    """Pairs (2i, 2i + 1), element j with the angle of pair j % (D / 2)."""
    own = np.concatenate([angles, angles], axis=-1)
    crossed = np.stack([-x[..., 1::2], x[..., ::2]], axis=-1).reshape(x.shape)
    return np.asarray((x * np.cos(own) + crossed * np.sin(own)) * factor)


def _twice(x: Array, angles: Array, factor: float) -> Array:
    return rotate(rotate(x, angles, factor), angles, factor)


def _in_place(first: int) -> Rotate:
    """The half that is rotated second reads the `first` one as it is after its rotation."""

    def turned(x: Array, angles: Array, factor: float) -> Array:
        halves = list(np.split(x, 2, axis=-1))
        cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
        for one in (first, 1 - first):
            halves[one] = halves[one] * cos + (halves[0] if one else -halves[1]) * sin
        return np.concatenate(halves, axis=-1)

    return turned


def _swapped(x: Array, angles: Array, factor: float) -> Array:
    return _halves_exchanged(rotate(x, angles, factor))


def _halves_exchanged(x: Array) -> Array:
    half = x.shape[-1] // 2
    return np.concatenate([x[..., half:], x[..., :half]], axis=-1)


def _mirrored(x: Array) -> Array:
    """Each pair as the complex conjugate."""
    return joined(complex_pairs(x).conj())


def _pairs_reversed(x: Array) -> Array:
    return joined(complex_pairs(x)[..., ::-1])


def _same(x: Array) -> Array:
    return x


@dataclass(frozen=True, slots=True)
class Coordinates:
    """How what went in and what came out of a wrong rotation are to be read for it to be the right one, and back."""

    given: Callable[[Array], Array]
    seen: Callable[[Array], Array]
    back: Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class RotaryForm:
    """A rotation that is not the right one: `name` of the cause, what it does in words, and `same`, the coordinates in
    which it is the right one, if there are any."""

    name: str
    text: str
    rotate: Rotate
    same: Coordinates | None = None


HALVES = RotaryForm("rope", "pairs (i, i + D/2) are rotated", rotate)

FORMS: tuple[RotaryForm, ...] = (
    RotaryForm("rope_not_applied", "the rotation is not applied at all", lambda x, angles, factor: x),
    RotaryForm(
        "rope_interleaved",
        "pairs (2i, 2i+1) are rotated instead of (i, i + D/2)",
        _interleaved,
        Coordinates(_unzip, _unzip, _zip),
    ),
    RotaryForm(
        "rope_interleaved",
        "pairs (2i, 2i+1) are rotated and written back as halves (i, i + D/2)",
        lambda x, angles, factor: rotate(_unzip(x), angles, factor),
        Coordinates(_unzip, _same, _same),
    ),
    RotaryForm(
        "rope_interleaved",
        "pairs (i, i + D/2) are rotated and written back as neighbours (2i, 2i+1)",
        lambda x, angles, factor: _zip(rotate(x, angles, factor)),
        Coordinates(_same, _unzip, _zip),
    ),
    RotaryForm("rope_twice", "the rotation is applied twice", _twice),
    RotaryForm(
        "rope_reversed",
        "the rotation runs backwards: the sign of the sine is wrong",
        lambda x, angles, factor: rotate(x, -angles, factor),
        Coordinates(_mirrored, _mirrored, _mirrored),
    ),
    RotaryForm(
        "rope_cos_sin_exchanged",
        "cosine and sine are exchanged",
        _exchanged,
        # By pi / 2 less the angle: mirrored and turned by a quarter.
        Coordinates(
            _mirrored,
            lambda x: joined((complex_pairs(x) * -1j).conj()),
            lambda x: joined(complex_pairs(x).conj() * 1j),
        ),
    ),
    RotaryForm(
        "rope_sign",
        "rotate_half lacks its minus: x1 cos + x2 sin, x2 cos + x1 sin",
        _terms(1, 1, 1),
    ),
    RotaryForm(
        "rope_sign",
        "rotate_half has the minus on both halves: x1 cos - x2 sin, x2 cos - x1 sin",
        _terms(1, -1, -1),
    ),
    RotaryForm(
        "rope_in_place",
        "the second half is rotated with the first one as it is after its rotation: written in place",
        _in_place(0),
    ),
    RotaryForm(
        "rope_in_place",
        "the first half is rotated with the second one as it is after its rotation: written in place",
        _in_place(1),
    ),
    RotaryForm(
        "rope_halves_kept",
        "rotate_half does not exchange the halves: x cos + x sin",
        lambda x, angles, factor: x * np.concatenate([np.cos(angles) + np.sin(angles)] * 2, -1) * factor,
    ),
    RotaryForm(
        "rope_sine_lost",
        "only the cosine's term is there: x cos",
        _terms(1, 0, 0),
    ),
    RotaryForm(
        "rope_cosine_lost",
        "only the sine's term is there: rotate_half(x) sin",
        _terms(0, -1, 1),
    ),
    RotaryForm(
        "rope_tables_interleaved",
        "the tables repeat each frequency (0, 0, 1, 1, …), the pairs are (i, i + D/2)",
        _pairs_tables,
    ),
    RotaryForm(
        "rope_interleaved",
        "pairs (2i, 2i+1) are rotated, with tables made for (i, i + D/2)",
        _halves_tables,
    ),
    RotaryForm(
        "rope_halves_swapped",
        "the two halves are written back in the wrong order",
        _swapped,
        Coordinates(_same, _halves_exchanged, _halves_exchanged),
    ),
    RotaryForm(
        "rope_frequencies_reversed",
        "the frequencies are applied in reverse order: the first pair turns slowest",
        lambda x, angles, factor: rotate(x, angles[..., ::-1], factor),
        Coordinates(_pairs_reversed, _pairs_reversed, _pairs_reversed),
    ),
)  # fmt: skip
