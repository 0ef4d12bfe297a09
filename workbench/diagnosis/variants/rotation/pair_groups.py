"""Some pairs of each head rotated by other positions than the rest, as with sections for time, height and width."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.operations.rotary_forms import Complex, complex_pairs, joined
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.rotation.angles import in_words
from lockstep.workbench.diagnosis.variants.rotation.positions import TokenPlaces, fit_positions, patterns
from lockstep.workbench.diagnosis.variants.rotation.rotated import Rotated
from lockstep.workbench.diagnosis.variants.variant import Variant

Pairs = NDArray[np.intp]


def pair_groups(site: Site) -> Iterator[Variant]:
    """The positions of the pairs that are wrong, where others are right."""
    r = Rotated.of(site)
    if r is None or not r.wrong.any():
        return
    count = r.x.shape[-1] // 2
    seen, right = (complex_pairs(r.wrong_part(x)) for x in (r.seen, site.expected))
    allowed = complex_pairs(r.wrong_part(site.parts[0].noise))
    wrong = (np.abs(seen - right) > 12 * np.abs(allowed)).any((0, 1))
    chosen = np.flatnonzero(wrong)
    if not 0 < len(chosen) < count:
        return
    made, told, numbers, free = complex_pairs(site.expected).copy(), [], dict[str, object](), 0
    sections = _sections(r, chosen)
    if len(sections) > 1 and all(_proportional(r, at) for _, at in sections):
        return  # other frequencies
    for pairs, at in sections:
        within = 1e-3 + 8 * r.noise / float(r.frequencies[..., pairs].max())
        known = next(iter(patterns(TokenPlaces.of(site.rows), at, r.wrong, within)), None)
        some = ", ".join(
            f"{p:g} at {q + 0.0:.4g}" for p, q in list(zip(r.positions, np.round(at, 6), strict=True))[:4]
        )
        words = f"{some}, …" if known is None else known.text
        positions = at if known is None else known.at
        made[..., pairs] = _turned(r, pairs, positions)
        told.append(
            f"{in_words(pairs.tolist(), count)} are rotated by other positions than the rest: {words}"
        )
        numbers |= {} if known is None else known.fitted
        free += int(r.wrong.sum()) if known is None else 0
    fitted = {"pairs": chosen.tolist(), **numbers}
    yield Variant("positions_of_pairs", "positions", "; ".join(told), fitted, joined(made), free)


def _sections(r: Rotated, chosen: Pairs) -> list[tuple[Pairs, Array]]:
    """The wrong pairs, all together or in two sections, with the positions [N] of each: those that leave least."""
    cuts = [[chosen], *([chosen[:i], chosen[i:]] for i in range(1, len(chosen)))]
    found = []
    for sections in cuts:
        fits = [(pairs, _positions(r, pairs)) for pairs in sections]
        rest = [np.abs(_turned(r, *fit) - complex_pairs(r.seen)[..., fit[0]])[r.wrong] for fit in fits]
        found.append((sum(float(np.square(one).sum()) for one in rest), fits))
    least = min(left for left, _ in found)
    return next(fits for left, fits in found if left <= 4 * least)


def _proportional(r: Rotated, at: Array) -> bool:
    """Whether positions are the right ones times one number."""
    right = r.positions[r.wrong]
    by = float((at[r.wrong] * right).sum() / max(float((right * right).sum()), 1e-300))
    return bool(np.allclose(at[r.wrong], by * right, atol=0.05))


def _positions(r: Rotated, pairs: Pairs) -> Array:
    """The positions [N] by which these pairs were rotated; of tokens that are right, theirs."""
    part = np.concatenate([pairs, pairs + r.x.shape[-1] // 2])
    turns = r.frequencies[..., pairs]
    own = turns[r.wrong] if len(turns) == len(r.wrong) else turns
    reach = 2 * float(r.positions.max()) + 64
    at = r.positions.copy()
    at[r.wrong] = fit_positions(r.wrong_part(r.x)[..., part], r.wrong_part(r.seen)[..., part], own,
                                r.positions[r.wrong], reach, r.noise).at  # fmt: skip
    return at


def _turned(r: Rotated, pairs: Pairs, at: Array) -> Complex:
    angles = at[:, None, None] * r.frequencies[..., pairs]
    return np.asarray(complex_pairs(r.x)[..., pairs] * np.exp(1j * angles) * r.factor)
