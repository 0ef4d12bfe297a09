"""Which keys a fused attention may have let each query see, found from what came out.

A row of the context says which run of neighbouring keys gives it: the sums over the keys that begin, or end, at each
one are made at once. Runs of a few rows then give the numbers of a mask's form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.attention import expand
from lockstep.workbench.diagnosis.operations.deviation import WRONG
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.attention.inside import Guess, Inside, Rows
from lockstep.workbench.diagnosis.variants.attention.mask import NUMBERS
from lockstep.workbench.diagnosis.variants.attention.mask_forms import Cells, Form, MaskForms, SeenMask
from lockstep.workbench.diagnosis.variants.blocks import positions

#: Forms that are tried, of more that the numbers give.
_MOST = 64
#: What masks add in place of -inf, where they add too little.
_ADDED = (-1.0, -5.0, -10.0, -20.0, -50.0, -100.0, -1000.0)


def fused_masks(inside: Inside) -> Iterator[Variant]:
    """Variants of the mask."""
    for name, text, change in NUMBERS:
        yield inside.variant(name, "mask", text, _numbers(inside, change))
    if inside.wanted("mask_finite"):
        yield from _finite(inside)
    yield from _one_hidden(inside)
    forms = MaskForms(inside.site, list(_seen(inside)))
    cached = all(inside.raw[i].shape[2] > inside.raw[i].shape[1] for i in inside.wrong_parts)
    for form in islice(forms, _MOST):
        if form.name == "mask_of_the_step":
            continue  # told as a cache that is not used
        if form.name == "mask_prefix_hidden" and cached:
            text = f"the first {form.fitted['keys']} rows of the cache are not read: they were dropped, or are masked"
            yield inside.variant("cache_cut_at_front", "cache", text, _of(inside, form), form.fitted)
        else:
            yield inside.variant(form.name, "mask", form.text, _of(inside, form), form.fitted)


def _numbers(inside: Inside, change: Callable[[Cells, Array], Array]) -> Guess:
    def scores(i: int, rows: Rows) -> Array:
        return change(~inside.allowed[i][:, rows], inside.raw[i][:, rows])

    return inside.of_scores(scores, inside.values)


def _of(inside: Inside, form: Form) -> Guess:
    def scores(i: int, rows: Rows) -> Array:
        return np.where(form.cells[i][rows], inside.raw[i][:, rows], -np.inf)

    return inside.of_scores(scores, inside.values)


def _finite(inside: Inside) -> Iterator[Variant]:
    """A finite number that is added to what should be masked, and does not hide it."""

    def by(number: float) -> Guess:
        return _numbers(inside, lambda hidden, x: np.where(hidden, x + number, x))

    number = inside.search(by, (-0.5, -2.0, *_ADDED))
    known = next((value for value in _ADDED if math.isclose(number, value, rel_tol=2e-2)), None)
    if known == -1:
        return  # told as a mask of ones and zeros
    number = number if known is None else known
    text = f"masked scores get the mask's {number:.4g}, which does not hide them: they keep a share"
    fitted = {"value": number}
    yield inside.variant("mask_finite", "mask", text, by(number), fitted, int(known is None))


def _one_hidden(inside: Inside) -> Iterator[Variant]:
    """A single key of a sequence that no query sees, found by leaving each out of the last wrong row."""
    if not inside.wanted("mask_keys_hidden"):
        return
    hidden: dict[int, int] = {}
    for sample in inside.sample:
        i, rows = sample.part, sample.rows
        seq, v = inside.site.taps.passes[inside.site.passes[i]].seq, inside.values(i)
        probs = inside.site.parts[i].inputs["probs"][:, rows[-1]]  # [heads, K]
        if v is None or seq in hidden:
            continue
        own = expand(v, len(probs)).swapaxes(0, 1)  # [heads, K, D]
        terms = probs[..., None] * own
        without = (terms.sum(1, keepdims=True) - terms) / np.maximum(1 - probs, 1e-300)[..., None]
        seen = inside.site.parts[i].seen[rows[-1]].reshape(len(probs), 1, -1)
        left = np.linalg.norm(without - seen, axis=(0, 2))
        if np.isfinite(left).any():
            hidden[seq] = int(np.nanargmin(left))

    def scores(i: int, rows: Rows) -> Array:
        gone = hidden.get(inside.site.taps.passes[inside.site.passes[i]].seq)
        x = inside.masked(i, rows, inside.raw[i][:, rows])
        return np.where(np.arange(x.shape[2]) == gone, -np.inf, x)

    told = "; ".join(f"of sequence {seq} the key at {key}" for seq, key in hidden.items())
    text = f"single keys are masked: {told}: a mask of padding, or of another sequence"
    fitted = {"keys": {str(seq): [key] for seq, key in hidden.items()}}
    guess = inside.of_scores(scores, inside.values)
    yield inside.variant("mask_keys_hidden", "mask", text, guess, fitted, len(hidden))


def _seen(inside: Inside) -> Iterator[SeenMask]:
    """What a few wrong rows were let see, as far as a run of keys gives them."""
    for sample in inside.sample:
        i, rows, cells = sample.part, sample.rows, sample.cells
        heads, _, keys = inside.raw[i].shape
        at = positions(inside.site.parts[i])
        for row, wrong in zip(rows.tolist(), _by_head(cells, heads), strict=True):
            for head in np.flatnonzero(wrong)[:2].tolist():
                run = _run(inside, i, head, row)
                if run is not None:
                    shown, only = np.zeros((len(at), keys), bool), np.zeros(len(at), bool)
                    shown[row, run], only[row] = True, True
                    yield SeenMask(i, head, shown, only)


def _by_head(cells: Cells, heads: int) -> Cells:
    """Which heads are wrong of each of the sample's rows: [rows, heads]."""
    if cells.ndim == 3:
        return np.asarray(cells.any(2).T)
    return np.asarray(cells.reshape(len(cells), heads, -1).any(2))


def _run(inside: Inside, i: int, head: int, row: int) -> slice | None:
    """The run of keys that gives what one head's row is."""
    part, heads = inside.site.parts[i], inside.raw[i].shape[0]
    may = np.flatnonzero(inside.allowed[i][head, row])
    x = inside.raw[i][head, row]
    if not len(may) or not np.isfinite(x).all():
        return None
    values = inside.values(i)
    if values is None:
        shown = np.flatnonzero(part.seen[head, row] > 0)
        return slice(int(shown[0]), int(shown[-1]) + 1) if len(shown) else None
    v = values[:, head * values.shape[1] // heads]
    seen = part.seen[row].reshape(heads, -1)[head]
    noise = float(np.linalg.norm(part.noise[row].reshape(heads, -1)[head]))
    weights = np.exp(x - x.max())
    terms = np.concatenate([weights[:, None], weights[:, None] * v], axis=1)  # [K, 1 + D]
    start, stop = int(may[0]), int(may[-1]) + 1
    for run_of, sums in (
        (lambda n: slice(n, stop), np.cumsum(terms[:stop][::-1], axis=0)[::-1]),  # begins at each key
        (lambda n: slice(start, start + n + 1), np.cumsum(terms[start:], axis=0)),  # ends at each key
    ):
        left = np.linalg.norm(sums[:, 1:] / sums[:, :1] - seen, axis=1)
        best = int(np.nanargmin(left)) if np.isfinite(left).any() else 0
        if left[best] <= 2 * WRONG * noise:
            return run_of(best)
    return None
