"""What can be stated of a product that no known mistake explains: whether its input was another, or its weight.

Nothing of the weight's numbers is known then; that a product of the inputs was made with other ones is shown by the
angles between tokens, which a product with any matrix of independent numbers keeps but for chance.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.fits import finite, least_squares
from lockstep.workbench.diagnosis.hypotheses.maps import Mapped
from lockstep.workbench.diagnosis.hypotheses.products.wrong import WrongProduct, mapped
from lockstep.workbench.diagnosis.hypotheses.variant import ELEMENTS_A_PARAMETER
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Out features beyond the in features that show that an output lies in the weight's range, as a share of those; out
#: features that are looked at, for each in feature; what of a rounding's noise may be left by what lies in the range.
_SPARE, _ENOUGH, _WITHIN = 1 / 8, 4, 3.0
#: Share of an input's size from which on a feature of it differs.
_DIFFERS = 1e-3
#: Tokens that show how two sets of vectors lie to each other; how alike the angles between them are.
_TOKENS, _ALIKE = 8, 0.5
#: Cosine up to which what was seen has nothing of what should have been: of N numbers 8 / sqrt(N), this at most.
_UNRELATED = 0.25


def another_input(site: Site) -> Iterator[Mapped]:
    """The output is the right product of some input, which is not the recorded one: with more out features than in
    features an output has to lie in the weight's range, and gives its input."""
    wrong = WrongProduct.of(site)
    if wrong is None or not wrong.whole_rows:
        return
    width, out = wrong.x.shape[1], len(wrong.columns)
    if out < width * (1 + _SPARE) + 4:
        return
    some = np.ix_(wrong.rows, np.linspace(0, out - 1, min(out, _ENOUGH * width)).astype(int))
    weight = wrong.weight[some[1][0]].astype(np.float64)
    given = (wrong.seen - wrong.rest)[some]
    basis, _ = np.linalg.qr(finite(weight))
    left = given - (given @ basis) @ basis.T
    larger = max(1.0, float(np.linalg.norm(wrong.seen) / max(float(np.linalg.norm(wrong.right)), 1e-300)))
    if np.linalg.norm(left) > _WITHIN * larger * np.linalg.norm(site.parts[0].noise[some]):
        return
    x = wrong.x.copy()
    x[wrong.rows] = least_squares(weight, given.T).T
    predicted = wrong.replay(x=x)
    if predicted is not None:
        cost = min(x[wrong.rows].size, wrong.error.size // ELEMENTS_A_PARAMETER)
        yield mapped("another_input", at=(_difference(wrong.wrong_x, x[wrong.rows]),)), predicted, cost


def _difference(before: Array, after: Array) -> str:
    """How the input that was multiplied differs from the recorded one, as a clause."""
    change = after - before
    odd = np.flatnonzero(np.sqrt((change**2).mean(0)) > _DIFFERS * float(np.sqrt((before**2).mean())))
    share = float(np.linalg.norm(change) / max(float(np.linalg.norm(before)), 1e-300))
    words = f", from which it differs by {share:.2g} of its size"
    if 0 < len(odd) < before.shape[1] // 2:
        zero = not np.abs(after[:, odd]).max() > _DIFFERS * float(np.sqrt((before**2).mean()))
        words += f": in {len(odd)} of {before.shape[1]} in features, the first is {odd[0]}{', which are zero' * zero}"
    elif len(before) > 2 and np.linalg.norm(change - change.mean(0)) < 0.05 * np.linalg.norm(change):
        words += ": the same vector is added to every token"
    elif abs(_cosine(before, after)) < 0.1:
        words += ": it has nothing of it"
    return words


def unrelated_weight(site: Site) -> Iterator[Mapped]:
    """Nothing of the checkpoint's weight is in the output, though it is a product of its inputs."""
    wrong = WrongProduct.of(site)
    if wrong is None or len(wrong.rows) < _TOKENS or not wrong.whole_rows:
        return
    x, seen, right = (_centred(y[wrong.rows]) for y in (wrong.x, wrong.seen, wrong.base))
    if not seen.any() or not right.any() or _alike_angles(x, seen) < _ALIKE:
        return
    if abs(_cosine(seen, right)) <= min(_UNRELATED, 8 / np.sqrt(seen.size)):
        size = float(np.linalg.norm(seen) / np.linalg.norm(x) / np.sqrt(seen.shape[1]))
        own = float(wrong.weight.std())
        name = "weight_initial" if abs(size / own - 1) > 0.2 else "weight_unrelated"
        yield mapped(name, at=(size, own)), wrong.seen, wrong.error.size // ELEMENTS_A_PARAMETER


def other_weight(site: Site) -> Iterator[Mapped]:
    """The error is a product of the inputs with some matrix: numbers of the weight differ, in no known pattern."""
    wrong = WrongProduct.of(site)
    if wrong is None or min(len(wrong.rows), len(wrong.columns)) < _TOKENS:
        return
    x, error, right = _centred(wrong.wrong_x), _centred(wrong.error), wrong.base[wrong.inside]
    # What is missing of the right product is one of the inputs by itself.
    base = _centred(right)
    own = error - (error * base).sum() / max(float((base**2).sum()), 1e-300) * base
    if not x.any() or not own.any() or _alike_angles(x, own) < _ALIKE:
        return
    share = float(np.linalg.norm(wrong.error) / max(float(np.linalg.norm(right)), 1e-300))
    some = not wrong.whole_rows
    figures = (float(len(wrong.columns)), float(site.first_out + wrong.columns[0])) if some else ()
    edit = mapped("some_weights_differ" if some else "weight_differs", at=(share, *figures))
    yield edit, wrong.put(wrong.seen[wrong.inside]), wrong.error.size // ELEMENTS_A_PARAMETER


def _centred(x: Array) -> Array:
    """Less the mean of all tokens: a bias has no part in it."""
    return np.asarray(x - x.mean(0))


def _cosine(a: Array, b: Array) -> float:
    return float((a * b).sum() / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-300))


def _alike_angles(a: Array, b: Array) -> float:
    """The correlation of the cosines between tokens in one and in the other."""
    return float(np.corrcoef(angles_between(a), angles_between(b))[0, 1])


def angles_between(x: Array) -> Array:
    """The cosines of all pairs of tokens."""
    unit = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-300)
    return np.asarray((unit @ unit.T)[np.triu_indices(len(x), 1)])
