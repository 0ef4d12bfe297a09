"""What can be said of a linear layer that no known mistake explains: whether it is its input that was another, or its
weight."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.fits import finite, least_squares
from lockstep.workbench.diagnosis.hypotheses.variant import ELEMENTS_A_PARAMETER, Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.linear.unloaded import ALIKE, FEW_TOKENS, alike_angles, centred
from lockstep.workbench.diagnosis.variants.replay import Linear

#: Out features beyond the in features that show that an output lies in the weight's range, as a share of those.
SPARE = 1 / 8
#: Out features that are looked at, for each in feature.
ENOUGH = 4
#: What of a rounding's noise may be left by the output that lies in the range.
WITHIN = 3.0
#: Share of an input's size from which on a feature of it differs.
DIFFERS = 1e-3


def another_input(site: Site) -> Iterator[Variant]:
    """The output is the right product of some input, which is not the recorded one: with more out features than in
    features an output has to lie in the weight's range, and tells its input."""
    linear = Linear.of(site)
    if linear is None or len(linear.columns) < linear.seen.shape[1]:
        return
    width, out = linear.x.shape[1], len(linear.columns)
    if out < width * (1 + SPARE) + 4:
        return
    some = np.linspace(0, out - 1, min(out, ENOUGH * width)).astype(int)
    weight = linear.weight[some].astype(np.float64)
    given = (linear.seen - linear.bias)[np.ix_(linear.rows, some)]
    basis, _ = np.linalg.qr(finite(weight))
    left = given - (given @ basis) @ basis.T
    noise = site.parts[0].noise[np.ix_(linear.rows, some)]
    larger = max(
        1.0, float(np.linalg.norm(linear.seen) / max(float(np.linalg.norm(linear.expected)), 1e-300))
    )
    if np.linalg.norm(left) > WITHIN * larger * np.linalg.norm(noise):
        return
    x = linear.x.copy()
    x[linear.rows] = least_squares(weight, given.T).T
    predicted = linear.replay(x=x)
    if predicted is None:
        return
    before, after = linear.x[linear.rows], x[linear.rows]
    text = (
        f"what comes out is the product of {site.weights['weight']} with another input than the recorded one"
        f"{_difference(before, after)}"
    )
    parameters = min(after.size, linear.error.size // ELEMENTS_A_PARAMETER)
    apart = float(np.linalg.norm(after - before) / max(float(np.linalg.norm(before)), 1e-300))
    yield Variant("another_input", "input", text, {"apart": apart}, predicted, parameters)


def _difference(before: Array, after: Array) -> str:
    """How the input that was multiplied differs from the recorded one, as a clause."""
    change = after - before
    scale = float(np.sqrt((before**2).mean()))
    odd = np.flatnonzero(np.sqrt((change**2).mean(0)) > DIFFERS * scale)
    share = float(np.linalg.norm(change) / max(float(np.linalg.norm(before)), 1e-300))
    words = f", from which it differs by {share:.2g} of its size"
    if 0 < len(odd) < before.shape[1] // 2:
        words += f": in {len(odd)} of {before.shape[1]} in features, the first is {odd[0]}"
        if not np.abs(after[:, odd]).max() > DIFFERS * scale:
            words += ", which are zero"
    elif len(before) > 2 and np.linalg.norm(change - change.mean(0)) < 0.05 * np.linalg.norm(change):
        words += ": the same vector is added to every token"
    elif np.abs((before * after).sum()) < 0.1 * np.linalg.norm(before) * np.linalg.norm(after):
        words += ": it has nothing of it"
    return words


def other_weight(site: Site) -> Iterator[Variant]:
    """The error is a product of the inputs with some matrix, as far as the angles between tokens tell: numbers of the
    weight differ, in no known pattern. Nothing is reproduced: they are not known."""
    linear = Linear.of(site)
    if linear is None or len(linear.rows) < FEW_TOKENS or len(linear.columns) < FEW_TOKENS:
        return
    x, error = centred(linear.x[linear.rows]), centred(linear.error)
    right = linear.product[np.ix_(linear.rows, linear.columns)]
    # What is missing of the right product is one of the inputs by itself.
    base = centred(right)
    own = error - (error * base).sum() / max(float((base**2).sum()), 1e-300) * base
    if not x.any() or not own.any() or alike_angles(x, own) < ALIKE:
        return
    share = float(np.linalg.norm(linear.error) / max(float(np.linalg.norm(right)), 1e-300))
    name = site.weights["weight"]
    which = name
    if len(linear.columns) < linear.seen.shape[1]:
        first = site.first_out + int(linear.columns[0])
        which = f"{len(linear.columns)} rows of {name} (the first is {first})"
    text = (
        f"{which} differ from the checkpoint's by {share:.2g} of their size, in no simple pattern: the error is a "
        "product of the inputs with another matrix (weights of another checkpoint, quantised weights whose groups, "
        "scales or order are read wrongly)"
    )
    fitted = {"weight": name, "share": share}
    parameters = linear.error.size // ELEMENTS_A_PARAMETER
    predicted = linear.expected.copy()
    where = np.ix_(linear.rows, linear.columns)
    predicted[where] = linear.seen[where]
    yield Variant("weight_differs", "weight", text, fitted, predicted, parameters)
