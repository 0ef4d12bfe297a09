"""Variants of a linear layer whose weight was never loaded, or that gets nothing to multiply."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.engine.graph import GATE_UP, QKV
from lockstep.workbench.diagnosis.hypotheses.variant import ELEMENTS_A_PARAMETER, Variant
from lockstep.workbench.diagnosis.operations.shares import rank_spans, weight_names
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.replay import Linear

#: Tokens that say how two sets of vectors lie to each other.
FEW_TOKENS = 8
#: Cosine up to which what was seen has nothing of what should have been: of N numbers 8 / sqrt(N), this at most.
UNRELATED = 0.25
#: How alike the angles between tokens are before and after a product with any matrix of independent numbers.
ALIKE = 0.5


def nothing_multiplied(site: Site) -> Iterator[Variant]:
    """The product is zero. It is the weight that is where all tokens have nothing and another layer with the same input
    or another rank has something; where the weight has served other tokens it is the input."""
    linear = Linear.of(site)
    if linear is None or len(linear.columns) < linear.seen.shape[1]:
        return
    name = site.weights["weight"]
    for bias, left in ((linear.bias, "nothing but the bias comes out"), (0.0, "nothing comes out")):
        if not linear.has_bias and not isinstance(bias, float):
            continue
        predicted = np.zeros_like(linear.expected) + bias
        if len(linear.rows) < len(linear.seen):
            text = f"its input is all zeros where it is wrong: {left}"
            yield Variant("input_zero", "input", text, {}, predicted)
        elif why := _others_have_input(site, linear) or _other_ranks_have_output(site):
            text = f"{name} is all zeros, as if it was never loaded: {left}, {why}"
            yield Variant("weight_zero", "weight", text, {"weight": name}, predicted)
        else:
            text = f"its input is all zeros, or its weight: {left}"
            yield Variant("input_zero", "input", text, {}, predicted)


def _others_have_input(site: Site, linear: Linear) -> str:
    """That a layer with the same input gave more than its bias, if one did."""
    siblings = next((kinds for kinds in (QKV, GATE_UP) if site.kind in kinds), ())
    for kind in siblings:
        tap = site.near(kind)
        out = None if kind == site.kind else site.rows_of(tap)
        if out is None or len(out) != len(linear.seen):
            continue
        names = weight_names(tap, "linear", site.facts)
        bias = site.facts.vector(names["bias"]) if "bias" in names else None
        span = rank_spans(tap, "linear", site.rank, site.taps, site.facts)[0]
        added = 0.0 if bias is None else bias if span is None else bias[span]
        if np.shape(added) in ((), out.shape[1:]) and (np.abs(out - added) > 1e-3 * np.abs(out).max()).any():
            return "and its input serves others"
    return ""


def _other_ranks_have_output(site: Site) -> str:
    """That other ranks multiply the same input, or their own shares of it, and get something, if they do."""
    others = (site.rows_of(site.tap, rank) for rank in site.taps.ranks if rank not in site.ranks)
    if not any(out is not None and out.any() for out in others):
        return ""
    return "while other ranks have something" + (" from the same input" if site.columns is None else "")


def unrelated_weight(site: Site) -> Iterator[Variant]:
    """Nothing of the checkpoint's weight is in the output, though it is a product of its inputs: with a matrix of
    independent numbers tokens keep, but for chance, the angles between each other. Nothing is reproduced: the numbers
    are not known."""
    linear = Linear.of(site)
    if linear is None or len(linear.rows) < FEW_TOKENS or len(linear.columns) < linear.seen.shape[1]:
        return
    x, seen, right = (centred(y[linear.rows]) for y in (linear.x, linear.seen, linear.product))
    if not seen.any() or not right.any():
        return
    limit = min(UNRELATED, 8 / np.sqrt(seen.size))
    if abs(_cosine(seen, right)) > limit or alike_angles(x, seen) < ALIKE:
        return
    size = float(np.linalg.norm(seen) / np.linalg.norm(x) / np.sqrt(seen.shape[1]))
    own = float(linear.weight.std())
    name = site.weights["weight"]
    text = (
        f"nothing of {name} is in the output, which is a product of its inputs with other numbers, of standard "
        f"deviation {size:.2g} (the checkpoint's have {own:.2g})"
    )
    if abs(size / own - 1) > 0.2:
        text += ": as if it was never loaded and kept its initial values"
    else:
        text += ": another weight, or its numbers in an unknown order"
    parameters = linear.error.size // ELEMENTS_A_PARAMETER
    yield Variant(
        "weight_unrelated", "weight", text, {"std": size, "should_be": own}, linear.seen, parameters
    )


def centred(x: Array) -> Array:
    """Less the mean of all tokens: a bias has no part in it."""
    return np.asarray(x - x.mean(0))


def _cosine(a: Array, b: Array) -> float:
    return float((a * b).sum() / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-300))


def alike_angles(a: Array, b: Array) -> float:
    """The correlation of the cosines between tokens in one and in the other."""
    pairs = np.triu_indices(len(a), 1)
    angles = []
    for x in (a, b):
        unit = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-300)
        angles.append((unit @ unit.T)[pairs])
    return float(np.corrcoef(angles[0], angles[1])[0, 1])
