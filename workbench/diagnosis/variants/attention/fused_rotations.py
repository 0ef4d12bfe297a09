"""Rotations inside of a fused attention, of which neither rotated queries nor keys were recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from lockstep.engine.graph.formula import rotate
from lockstep.workbench.diagnosis.hypotheses.rotation.conventions import NAMED, Convention
from lockstep.workbench.diagnosis.hypotheses.rotation.frequencies import KNOWN_BASES
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.rotary import frequencies, lengths_of, magnitude
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.attention.inside import Guess, Inside, Rows
from lockstep.workbench.diagnosis.variants.blocks import history, others, positions, shaped, unrotated

#: What is done to x [N, heads, D] at positions [N], in a pass.
_Turn = Callable[[Array, Array, int], Array]


def fused_rotations(inside: Inside) -> Iterator[Variant]:
    """Variants of the rotation of queries and keys."""
    site, model = inside.site, inside.site.facts.model
    if any(site.taps.captured(site.near(f"attn.{which}_rope")) for which in "qk"):
        return  # judged there
    plain_q, plain_k = others(site, unrotated(site, "q")), history(site, unrotated(site, "k"))
    q = [shaped(x, part.inputs["q"]) for x, part in zip(plain_q, site.parts, strict=True)]
    k = [shaped(x, part.inputs["k"]) for x, part in zip(plain_k, site.parts, strict=True)]

    def guess(turn: _Turn) -> Guess:
        def scores(i: int, rows: Rows) -> Array | None:
            queries, keys = q[i], k[i]
            if queries is None or keys is None:
                return None
            at = positions(site.parts[i]).astype(np.float64)[rows]
            first = turn(queries[rows], at, i)
            second = turn(keys, np.arange(len(keys), dtype=np.float64), i)
            return inside.masked(i, rows, inside.products(first, second))

        return inside.of_scores(scores, inside.values)

    def angles(at: Array, i: int, theta: float | None = None) -> Array:
        return np.asarray(at[:, None, None] * frequencies(model, lengths_of(site.parts[i].rows[-1:]), theta))

    factor = magnitude(model)

    def of_form(form: Convention) -> Guess:
        return guess(lambda x, at, i: form.rotate(x, angles(at, i)) * factor)

    def of_base(theta: float) -> Guess:
        return guess(lambda x, at, i: rotate(x, angles(at, i, theta), factor))

    text = "inside of the attention the rotation is not applied at all"
    yield inside.variant("rope_not_applied", "rope", text, guess(lambda x, at, i: x))
    for form, (name, text) in NAMED.items():
        yield inside.variant(name, "rope", f"inside of the attention {text}", of_form(form))
    for base in KNOWN_BASES:
        if base != model.rope_theta:
            text = f"rope_theta is {base:g} instead of {model.rope_theta:g}, inside of the attention"
            yield inside.variant("rope_theta", "rope", text, of_base(base), {"theta": base})
