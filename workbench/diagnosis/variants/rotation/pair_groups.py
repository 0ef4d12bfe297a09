"""Some pairs of each head rotated by other positions than the rest, as with sections for time, height and width."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workbench.diagnosis.operations.rotary_forms import complex_pairs, joined, rotate
from workbench.diagnosis.operations.site import Site
from workbench.diagnosis.variants.rotation.angles import in_words
from workbench.diagnosis.variants.rotation.positions import TokenPlaces, fit_positions, patterns
from workbench.diagnosis.variants.rotation.rotated import Rotated
from workbench.diagnosis.variants.variant import Variant


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
    part = np.concatenate([chosen, chosen + count])
    turns = r.frequencies[..., chosen]
    own = turns[r.wrong] if len(turns) == len(r.wrong) else turns
    reach = 2 * float(r.positions.max()) + 64
    found = fit_positions(r.wrong_part(r.x)[..., part], r.wrong_part(r.seen)[..., part], own,
                          r.positions[r.wrong], reach, r.noise)  # fmt: skip
    at = r.positions.copy()
    at[r.wrong] = found.at
    within = 1e-3 + 8 * r.noise / float(own.max())
    found_by = [
        (one.at, one.text, one.fitted, 0) for one in patterns(TokenPlaces.of(site.rows), at, r.wrong, within)
    ]
    told = ", ".join(f"{p:g} at {q:.4g}" for p, q in list(zip(r.positions, at, strict=True))[:4])
    for positions, words, numbers, free in found_by or [(at, f"{told}, …", {}, int(r.wrong.sum()))]:
        made = complex_pairs(site.expected).copy()
        made[..., chosen] = complex_pairs(rotate(r.x[..., part], positions[:, None, None] * turns, r.factor))
        text = f"{in_words(chosen.tolist(), count)} are rotated by other positions than the rest: {words}"
        fitted = {"pairs": chosen.tolist(), **numbers}
        yield Variant("positions_of_pairs", "positions", text, fitted, joined(made), free)
