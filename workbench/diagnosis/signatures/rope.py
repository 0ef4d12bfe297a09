"""Causes at q_rope and k_rope: which rotation was applied instead of the right one.

A head's pair (i, i + D/2) is read as one complex number, so that a rotation by an angle is a product.
The golden rotation is taken from the golden tensors themselves, whatever theta and scaling made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.diagnosis.recompute import complex_pairs, rotation
from workbench.diagnosis.recording import Array
from workbench.diagnosis.signatures.evidence import Evidence, Signature
from workbench.views.causes import Cause

Complex = NDArray[np.complex128]

#: Position offsets that are tried, in both directions, beside "stuck at 0".
OFFSETS = 8


@dataclass(frozen=True, slots=True)
class _Turn:
    """What went in and came out of the rotation. Arrays [T, heads, D]."""

    given: Array  # the engine's input
    seen: Array  # the engine's output
    right: Array  # the golden output
    rotation: Complex  # [T, 1, D/2]: the golden one


def _turn(e: Evidence) -> _Turn | None:
    name = e.kind.removesuffix("_rope")
    given, seen, right, before = (
        _first(e.seen, name), e.seen(e.kind), e.right(e.kind), _first(e.right, name)
    )  # fmt: skip
    if given is None or seen is None or right is None or before is None:
        return None
    if seen.shape != right.shape or given.size != right.size or before.size != right.size:
        return None
    given, before = given.reshape(right.shape), before.reshape(right.shape)
    if not all(np.isfinite(x).all() for x in (given, seen, before, right)):
        return None
    return _Turn(given, seen, right, rotation(before, right))


def _first(look: object, name: str) -> Array | None:
    """The input of the rotation: the normalised tensor where the model normalises q and k."""
    assert callable(look)
    normed: Array | None = look(f"{name}_norm")
    return normed if normed is not None else look(f"{name}_proj")


def _unhalve(z: Complex) -> Array:
    return np.concatenate([z.real, z.imag], axis=-1)


def no_rotation(e: Evidence) -> Cause | None:
    """What comes out is what went in. In decode after a right prefill: the position is stuck at 0."""
    turn = _turn(e)
    if turn is None:
        return None
    name, text = "rope_not_applied", "the rotation is not applied at all"
    if e.step > 0:
        name, text = "position_stuck", "decode tokens are rotated as if they stood at position 0"
    return e.explains(name, text, {"step": e.step}, turn.given, turn.seen, turn.right)


def interleaved(e: Evidence) -> Cause | None:
    """The golden angles were applied to the pairs (2i, 2i + 1)."""
    turn = _turn(e)
    if turn is None:
        return None
    turned = (turn.given[..., ::2] + 1j * turn.given[..., 1::2]) * turn.rotation
    predicted = np.stack([turned.real, turned.imag], axis=-1).reshape(turn.seen.shape)
    return e.explains("rope_interleaved", "pairs (2i, 2i+1) are rotated instead of (i, i + D/2)",
                      {"pairs": "interleaved"}, predicted, turn.seen, turn.right)  # fmt: skip


def applied_twice(e: Evidence) -> Cause | None:
    """Every angle is twice the golden one."""
    turn = _turn(e)
    if turn is None:
        return None
    predicted = _unhalve(complex_pairs(turn.given) * turn.rotation**2)
    return e.explains(
        "rope_twice", "the rotation is applied twice", {"times": 2}, predicted, turn.seen, turn.right
    )


def position_offset(e: Evidence) -> Cause | None:
    """All tokens of the step are rotated by the same number of positions too far."""
    turn, unit = _turn(e), _one_position(e)
    if turn is None or unit is None:
        return None
    found = []
    for offset in [*range(-OFFSETS, 0), *range(1, OFFSETS + 1)]:
        predicted = _unhalve(complex_pairs(turn.given) * turn.rotation * unit**offset)
        text = f"tokens stand {abs(offset)} position{'s' * (abs(offset) > 1)} too {'far' if offset > 0 else 'early'}"
        found.append(
            e.explains("position_offset", text, {"offset": offset}, predicted, turn.seen, turn.right)
        )
    return min(filter(None, found), key=lambda cause: cause.unexplained, default=None)


def _one_position(e: Evidence) -> Complex | None:
    """The rotation [D/2] between neighbouring positions, from the golden prefill."""
    name = e.kind.removesuffix("_rope")
    tap = e.near(e.kind)
    after = e.golden.whole_or_none(tap, 0, e.seq)
    before = _first(lambda kind: e.golden.whole_or_none(e.near(kind), 0, e.seq), name)
    if after is None or before is None or len(after) < 2:
        return None
    turns = rotation(before.reshape(after.shape), after)[:, 0]
    between = turns[1:] * turns[:-1].conj()
    return np.asarray(np.exp(1j * np.angle(between.mean(0))))


def other_angles(e: Evidence) -> Cause | None:
    """The right pairs are rotated, by angles that no simpler cause explains: theta or frequency scaling."""
    turn = _turn(e)
    if turn is None or turn.seen.shape[1] < 2:  # one head's rotation can always be fitted
        return None
    if no_rotation(e) or applied_twice(e) or position_offset(e):
        return None
    fitted = rotation(turn.given, turn.seen)
    predicted = _unhalve(complex_pairs(turn.given) * fitted)
    excess = np.abs(np.angle(fitted * turn.rotation.conj())).max((0, 1))  # [D/2]
    wrong = np.flatnonzero(excess > 1e-3)
    if not len(wrong) or abs(np.abs(fitted) / np.abs(turn.rotation) - 1).max() > 1e-2:
        return None
    text = f"pairs are rotated by other angles at {len(wrong)} of {len(excess)} frequencies: theta or scaling"
    return e.explains(
        "rope_frequencies", text, {"frequencies": wrong.tolist()}, predicted, turn.seen, turn.right
    )


_ROPE: tuple[Signature, ...] = (no_rotation, interleaved, applied_twice, position_offset, other_angles)

ROPE: Mapping[str, tuple[Signature, ...]] = dict.fromkeys(("attn.q_rope", "attn.k_rope"), _ROPE)
