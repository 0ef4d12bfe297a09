"""What a fused attention may have computed instead of softmax(q . k / sqrt(head_dim)) times values, from end to end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.facts import UNIT
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.attention.fused_masks import fused_masks
from lockstep.workbench.diagnosis.variants.attention.fused_rotations import fused_rotations
from lockstep.workbench.diagnosis.variants.attention.fused_rows import (
    LIKELY,
    UNLIKELY,
    fused_heads,
    fused_rows,
)
from lockstep.workbench.diagnosis.variants.attention.inside import Guess, Inside, Rows
from lockstep.workbench.diagnosis.variants.attention.score_biases import paper_slopes
from lockstep.workbench.diagnosis.variants.attention.scores import SOFT_CAPS, meanings, other_operands
from lockstep.workbench.diagnosis.variants.attention.softmax import FORMS, coarse
from lockstep.workbench.diagnosis.variants.blocks import by_head, places, positions

#: Factors of the right scale among which the one that fits is looked for.
_FACTORS = (*(-(10.0**x) for x in np.linspace(-2, 2, 9)), *(10.0**x for x in np.linspace(-2.5, 2.5, 61)))
#: Caps, over the largest score.
_CAPS = tuple(10.0**x for x in np.linspace(-1.5, 2, 29))


def fused(site: Site) -> Iterator[Variant]:
    """Variants of attention in one kernel, of one layer on one rank."""
    if not all(part.fits for part in site.parts):
        return
    inside = Inside(site)
    yield from _scales(inside)
    yield from fused_rows(inside, LIKELY)
    yield from fused_heads(inside)
    yield from fused_masks(inside)
    yield from fused_rotations(inside)
    yield from _operands(inside)
    yield from _softmaxes(inside)
    yield from _soft_caps(inside)
    yield from _slopes(inside)
    yield from _sinks(inside)


def fused_unlikely(site: Site) -> Iterator[Variant]:
    """Variants that explain a context as well as a likelier one would, where none of those does."""
    if all(part.fits for part in site.parts):
        inside = Inside(site)
        yield from fused_rows(inside, UNLIKELY)
        yield from _softmaxes(inside, _UNLIKELY_FORMS)


def _of_scores(inside: Inside, change: Callable[[Array], Array]) -> Guess:
    """Scores changed one by one, under the right mask."""

    def scores(i: int, rows: Rows) -> Array:
        return inside.masked(i, rows, change(inside.raw[i][:, rows]))

    return inside.of_scores(scores, inside.values)


def _resolution(site: Site) -> float:
    """How far a number fitted through a softmax may be from the one that it stands for, relative."""
    return max(2e-3, 8 * site.facts.unit)


def _scales(inside: Inside) -> Iterator[Variant]:
    """Another factor in the place of 1 / sqrt(head_dim)."""
    site, scale = inside.site, inside.scale
    if not inside.wanted("scores_scale"):
        return

    def by(factor: float) -> Guess:
        return _of_scores(inside, lambda x: x * factor)

    factor = inside.search(by, _FACTORS)
    near = _resolution(site)
    known = [
        (value, words)
        for value, words in meanings(site, scale)
        if math.isclose(factor * scale, value, rel_tol=near, abs_tol=0.0 if value else 1e-2 * scale)
    ]
    factor = known[0][0] / scale if known else factor
    told = (
        f"{factor * scale:.5g} instead of {scale:.5g} = 1/sqrt(head_dim), {factor:.5g} times the right scale"
    )
    words = ", or ".join(words for _, words in known)
    text = f"scores are scaled by {told}{': ' + words if words else ''}"
    fitted = {"scale": factor * scale, "ratio": factor, "meanings": [words for _, words in known]}
    yield inside.variant(
        "scores_scale", "scores", text, by(factor), fitted, 0 if known else 1, grown=max(1.0, abs(factor))
    )


def _soft_caps(inside: Inside) -> Iterator[Variant]:
    """cap * tanh(score / cap)."""
    top = max((float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in inside.raw), default=0.0)
    if not top or not inside.wanted("scores_soft_cap"):
        return

    def by(cap: float) -> Guess:
        return _of_scores(inside, lambda x: cap * np.tanh(x / cap))

    cap = inside.search(by, [top * x for x in _CAPS])
    known = [value for value in SOFT_CAPS if math.isclose(cap, value, rel_tol=5e-2)]
    cap = known[0] if known else cap
    text = (
        f"scores pass through a soft cap that this model does not have: {cap:.4g} * tanh(score / {cap:.4g})"
    )
    yield inside.variant("scores_soft_cap", "scores", text, by(cap), {"cap": cap}, 0 if known else 1)


def _operands(inside: Inside) -> Iterator[Variant]:
    """Scores of other operands than rotated queries and cached keys."""
    site = inside.site
    right: Sequence[Array | None] = [x / inside.scale for x in inside.raw]
    for name, text, raw in other_operands(site, right):
        if name == "scores_of_values":
            continue  # told of the rows

        def scores(i: int, rows: Rows, raw: Sequence[Array | None] = raw) -> Array | None:
            x = raw[i]
            if x is None or x.shape != inside.raw[i].shape or not np.isfinite(x).all():
                return None
            return inside.masked(i, rows, x[:, rows] * inside.scale)

        yield inside.variant(name, "scores", text, inside.of_scores(scores, inside.values))


#: Forms of the softmax that are as well another mask's, or another factor's.
_UNLIKELY_FORMS = ("probs_of_own_key", "probs_of_first_key", "probs_uniform")
_LIKELY_FORMS = tuple(name for name, _, _ in FORMS if name not in _UNLIKELY_FORMS)


def _softmaxes(inside: Inside, names: Sequence[str] = _LIKELY_FORMS) -> Iterator[Variant]:
    """Other probabilities of the right scores."""
    site = inside.site

    def of(made: Callable[[int], Array]) -> Guess:
        return lambda i, rows: (made(i)[:, rows], inside.values(i))

    for name, text, form in FORMS:
        if name in names:

            def made(i: int, form: Callable[[Array, Array], Array] = form) -> Array:
                return form(site.parts[i].inputs["scores"], site.parts[i].inputs["probs"])

            yield inside.variant(name, "softmax", text, of(made))
    if names is not _LIKELY_FORMS:
        return
    before = "the softmax ran before the mask: later tokens take a share that nobody gets"
    yield inside.variant("softmax_before_mask", "softmax", before, of(lambda i: _hidden_after(inside, i)))
    for text, dtype, change, tolerance in coarse(site.facts):
        guess = of(partial(_changed, inside, change))
        # A coarse score is off by its own rounding.
        grown = UNIT[dtype] / site.facts.unit
        yield inside.variant(
            "softmax_low_precision", "precision", text, guess, {"dtype": dtype}, 0, tolerance, grown
        )


def _changed(inside: Inside, change: Callable[[Array], Array], i: int) -> Array:
    return change(inside.site.parts[i].inputs["scores"])


def _hidden_after(inside: Inside, i: int) -> Array:
    x = inside.raw[i]
    found = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(found / found.sum(-1, keepdims=True) * inside.allowed[i])


def _slopes(inside: Inside) -> Iterator[Variant]:
    """ALiBi (Press et al. 2022, arXiv:2108.12409) with its published slopes."""
    site = inside.site
    slopes = np.array(paper_slopes(site, len(inside.raw[0])))[:, None, None]

    def scores(i: int, rows: Rows) -> Array:
        part = site.parts[i]
        keys = np.arange(inside.raw[i].shape[2])
        far = positions(part)[rows][:, None] - keys[None, :]
        return inside.masked(i, rows, inside.raw[i][:, rows] - slopes * far)

    text = "a bias linear in the distance of query and key is added to the scores (ALiBi, with its published slopes)"
    yield inside.variant("scores_alibi", "scores", text, inside.of_scores(scores, inside.values))


def _sinks(inside: Inside) -> Iterator[Variant]:
    """A number of each head's own in the denominator: contexts that are shorter than they should be."""
    site = inside.site
    if inside.values(0) is None or not inside.wanted("softmax_sink"):
        return
    logs: dict[int, list[float]] = {}
    for i, head in places(site):
        part = site.parts[i]
        right, seen = (by_head(site, x)[head] for x in (part.expected, part.seen))
        kept = (right * seen).sum(1) / np.maximum((right**2).sum(1), 1e-300)
        total = np.logaddexp.reduce(part.inputs["scores"][head], axis=1)
        good = (kept > 1e-6) & (kept < 1)
        logs.setdefault(head, []).extend((total + np.log(1 / np.where(good, kept, 0.5) - 1))[good].tolist())
    sinks = {head: float(np.median(found)) for head, found in logs.items() if found}
    if not sinks:
        return

    def of(i: int) -> Array:
        probs = site.parts[i].inputs["probs"].copy()
        for head, sink in sinks.items():
            total = np.logaddexp.reduce(site.parts[i].inputs["scores"][head], axis=1)
            probs[head] *= np.exp(-np.logaddexp(0.0, sink - total))[:, None]
        return probs

    text = "each head's denominator holds one number more: an attention sink that this model does not have"
    fitted = {"sinks": {str(head): sink for head, sink in sinks.items()}}
    guess: Guess = lambda i, rows: (of(i)[:, rows], inside.values(i))  # noqa: E731
    yield inside.variant("softmax_sink", "softmax", text, guess, fitted, len(sinks))
