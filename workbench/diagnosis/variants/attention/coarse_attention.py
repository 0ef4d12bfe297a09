"""Attention in fewer bits inside: products that are rounded before they are scaled, probabilities in eight bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.blocks import of_scores, products
from lockstep.workbench.diagnosis.hypotheses.roundings import float8
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.facts import UNIT, rounded
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.attention.inside import Guess, Inside
from lockstep.workbench.diagnosis.variants.attention.softmax import divided

#: Half a step of the grid of a type, and what the roundings of a sum add to it: how far what lies on it may be.
_APART = 1.02


def coarse_products(site: Site) -> Iterator[Variant]:
    """Queries times keys in 16 bits, which are scaled after that, or queries that were scaled in 16 bits before."""
    if not all(part.fits for part in site.parts):
        return
    scale = site.facts.model.scale
    for dtype in (dtype for dtype in ("bfloat16", "float16") if UNIT[dtype] > site.facts.unit):
        fitted = {"dtype": dtype}
        for operands, words in ((True, "queries and keys, and their products,"), (False, "products")):
            guesses: list[Array] = []
            for part in site.parts:
                q, k = part.inputs["q"], part.inputs["k"]
                raw = products(_low(q, dtype), _low(k, dtype)) if operands else products(q, k)
                guesses.append(_on_grid(part.seen / scale, raw, dtype, site.facts.unit) * scale)
            text = f"{words} are rounded to {dtype} before they are scaled"
            yield Variant("low_precision", "precision", text, fitted, of_scores(site, guesses))
        made = [
            products(_low(_low(part.inputs["q"], dtype) * scale, dtype), _low(part.inputs["k"], dtype))
            for part in site.parts
        ]
        text = f"queries are scaled in {dtype} before they meet the keys, in {dtype} too"
        yield Variant("low_precision", "precision", text, fitted, of_scores(site, made))


def _low(x: Array, dtype: str) -> Array:
    return rounded(x, dtype).astype(np.float64)


def _on_grid(seen: Array, right: Array, dtype: str, unit: float) -> Array:
    """What was seen where it lies on the grid of a type, beside the right value: which of two neighbours it is hangs on
    how the sum was rounded. The right value, rounded, elsewhere."""
    held = _low(seen, dtype)
    there = np.abs(held - seen) <= 4 * unit * np.abs(seen)
    near = np.abs(held - right) <= _APART * UNIT[dtype] * np.maximum(np.abs(held), np.abs(right))
    return np.where(there & near, held, _low(right, dtype))


_Rounding = Callable[[Array], Array]


def _multiples(of: int, cut: bool) -> _Rounding:
    return lambda p: (np.floor(p * of) if cut else np.rint(p * of)) / of


def _of_largest(of: int) -> _Rounding:
    """Multiples of the n-th part of each row's largest."""

    def change(p: Array) -> Array:
        step = p.max(-1, keepdims=True) / of
        return np.asarray(np.rint(p / np.where(step > 0, step, 1.0)) * step)

    return change


def _float8(mantissa: int, least: int, largest: float, scaled: bool, p: Array) -> Array:
    return np.asarray(float8(p, mantissa, least, largest, scaled=scaled), dtype=np.float64)


#: What probabilities [heads, T, K] may have been rounded to, in words.
_ROUNDINGS: tuple[tuple[str, _Rounding], ...] = (
    *(
        (f"{how} whole multiples of 1/{of} ({bits} bits, fixed point)", _multiples(of, cut))
        for bits in (8, 7, 6, 5, 4, 10, 12, 16)
        for of in (2**bits - 1, 2**bits)
        for cut, how in ((False, "rounded to"), (True, "cut to"))
    ),
    *((f"rounded to 1/{of} of each row's largest (8 bits)", _of_largest(of)) for of in (127, 255)),
    ("rounded to float8 (e4m3)", partial(_float8, 3, -6, 448.0, False)),
    ("rounded to float8 (e4m3, scaled)", partial(_float8, 3, -6, 448.0, True)),
    ("rounded to float8 (e5m2)", partial(_float8, 2, -14, 57344.0, False)),
)


def coarse_probabilities(site: Site) -> Iterator[Variant]:
    """Probabilities in few bits, as they came out or as they met the values, made to add up to 1 again or not."""
    if not all(part.fits for part in site.parts):
        return
    inside = Inside(site)
    for words, change in _ROUNDINGS:
        for again, after in (("", change), (", then made to add up to 1", _normalised(change))):
            text = f"probabilities are {words}{again}"
            yield inside.variant("probs_low_precision", "precision", text, _guess(inside, after))


def _normalised(change: _Rounding) -> _Rounding:
    return lambda p: divided(change(p))


def _guess(inside: Inside, change: _Rounding) -> Guess:
    return lambda i, rows: (change(inside.probs(i)[:, rows]), inside.values(i))
