"""What wrong attention probabilities may be instead of a softmax over the keys, on the scores that were recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.attention.sinks import SINK_WORDS, sink_forms
from lockstep.workbench.diagnosis.hypotheses.blocks import in_place, others, products
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.facts import UNIT, Facts, rounded
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: (name, text, what scores and right probabilities [heads, T, K] become)
_Form = tuple[str, str, Callable[[Array, Array], Array]]


def softmaxes(site: Site) -> Iterator[Variant]:
    """Variants of one layer's softmax on one rank that have no number of their own."""
    if not all(part.fits for part in site.parts):
        return
    for (how, *numbers), of_sinks in sink_forms(site):
        name, text = SINK_WORDS[str(how)]
        guesses = [of_sinks(part.inputs["scores"]) for part in site.parts]
        noises = [_grown(part, guess) for part, guess in zip(site.parts, guesses, strict=True)]
        yield Variant(name, "softmax", text.format(*numbers), {}, in_place(site, guesses), noise=noises)
    for name, text, form in FORMS:
        guesses = [form(part.inputs["scores"], part.expected) for part in site.parts]
        yield Variant(name, "softmax", text, {}, in_place(site, list(guesses)))
    yield from _before_the_mask(site)
    yield from _coarse(site)


def _grown(part: Part, guess: Array) -> Array:
    """The noise of probabilities that are larger or smaller than the right ones: relative, it is the same."""
    by = np.divide(guess, part.expected, out=np.ones_like(guess), where=part.expected > 0)
    return part.noise * np.maximum(by, 1.0)


def softmax(x: Array, axis: int = -1) -> Array:
    """0 where all is -inf."""
    return divided(powers(x, axis), axis)


def _plain(x: Array, axis: int) -> Array:
    """NaN where all is -inf."""
    found = np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))
    return np.asarray(found / found.sum(axis, keepdims=True))


def powers(x: Array, axis: int = -1) -> Array:
    """Exponentials of the distance to the maximum; 0 where all is -inf."""
    top = x.max(axis, keepdims=True, initial=-np.inf)
    return np.asarray(np.exp(x - np.where(np.isfinite(top), top, 0.0)))


def divided(x: Array, axis: int = -1) -> Array:
    """By its sum; 0 where that is 0."""
    total = x.sum(axis, keepdims=True)
    return np.asarray(x / np.where(total == 0, 1.0, total))


def hot(p: Array, keys: Array) -> Array:
    """Probabilities [heads, T, K] that are all on one key a query, `keys` [T] or [heads, T]."""
    found = np.zeros_like(p)
    np.put_along_axis(found, np.broadcast_to(keys, p.shape[:2])[..., None].astype(np.int64), 1.0, axis=-1)
    return found


def newest(p: Array) -> Array:
    """All on the query's own key."""
    return hot(p, p.shape[2] - p.shape[1] + np.arange(p.shape[1]))


def _sum(x: Array) -> Array:
    return np.asarray(x.sum(-1, keepdims=True))


FORMS: tuple[_Form, ...] = (
    (
        "softmax_over_queries",
        "the softmax runs over the queries, not over the keys",
        lambda x, p: softmax(x, 1),
    ),
    ("softmax_over_heads", "the softmax runs over the heads, not over the keys", lambda x, p: softmax(x, 0)),
    (
        "softmax_over_queries",
        "the softmax runs over the queries, not over the keys; keys that no query sees are NaN",
        lambda x, p: _plain(x, 1),
    ),
    (
        "softmax_over_heads",
        "the softmax runs over the heads, not over the keys; masked keys are NaN",
        lambda x, p: _plain(x, 0),
    ),
    (
        "softmax_over_heads",
        "the softmax runs over the heads, not over the keys; masked keys, at a large negative number, share alike",
        lambda x, p: softmax(np.where(np.isfinite(x), x, 0.0), 0),
    ),
    ("softmax_not_normalised", "the exponentials are not divided by their sum", lambda x, p: powers(x)),
    (
        "softmax_not_normalised",
        "the exponentials of the scores, their maximum not subtracted, are not divided by their sum",
        lambda x, p: np.exp(x),
    ),
    (
        "softmax_missing",
        "the scores themselves are used: there is no softmax",
        lambda x, p: np.where(np.isfinite(x), x, 0.0),
    ),
    (
        "softmax_plus_one",
        "1 is added to the denominator: a token may attend to nothing",
        lambda x, p: np.exp(x) / (1 + _sum(np.exp(x))),
    ),
    (
        "softmax_plus_one",
        "1 is added to the sum of exponentials after the maximum was subtracted",
        lambda x, p: powers(x) / (1 + _sum(powers(x))),
    ),
    (
        "softmax_twice",
        "the softmax is taken twice",
        lambda x, p: softmax(np.where(np.isfinite(x), p, -np.inf)),
    ),
    ("softmax_twice", "the softmax is taken twice, then over masked keys as well", lambda x, p: softmax(p)),
    ("softmax_squared", "probabilities are squared", lambda x, p: p**2),
    (
        "sigmoid_instead_of_softmax",
        "a sigmoid takes the place of the softmax: each score by itself, nothing adds up to 1",
        lambda x, p: 1 / (1 + np.exp(-x)),
    ),
    (
        "sigmoid_instead_of_softmax",
        "sigmoids of the scores, divided by their sum, take the place of the softmax",
        lambda x, p: divided(1 / (1 + np.exp(-x))),
    ),
    (
        "probs_mean_over_heads",
        "all heads have the mean of the probabilities",
        lambda x, p: np.broadcast_to(p.mean(0), p.shape),
    ),
    (
        "probs_uniform",
        "all keys that may be seen have the same probability: scores are not used",
        lambda x, p: softmax(np.where(np.isfinite(x), 0.0, -np.inf)),
    ),
    (
        "probs_hard",
        "the likeliest key has all of the probability: an argmax in the place of the softmax",
        lambda x, p: hot(p, p.argmax(-1)),
    ),
    (
        "probs_transposed",
        "queries and keys are exchanged in the probabilities",
        lambda x, p: p.swapaxes(1, 2) if p.shape[1] == p.shape[2] else p,
    ),
    ("probs_of_own_key", "each token's own key has all of the probability", lambda x, p: newest(p)),
    (
        "probs_of_first_key",
        "the first key has all of the probability",
        lambda x, p: hot(p, np.zeros(p.shape[1])),
    ),
    (
        "relu_instead_of_softmax",
        "scores below zero are cut off, and the rest is divided by its sum",
        lambda x, p: divided(np.where(np.isfinite(x), np.maximum(x, 0), 0)),
    ),
)


def _before_the_mask(site: Site) -> Iterator[Variant]:
    """Probabilities over all keys, of which the masked ones were set to zero afterwards."""
    q, k = others(site, "attn.q_rope"), others(site, "attn.k_cache")
    scale, guesses = site.facts.model.scale, []
    for a, b, part in zip(q, k, site.parts, strict=True):
        if a is None or b is None:
            return
        raw = products(a, b) * scale
        fits = raw.shape == part.expected.shape
        guesses.append(softmax(raw) * np.isfinite(part.inputs["scores"]) if fits else None)
    text = "the softmax ran before the mask: later tokens take a share that nobody gets"
    yield Variant("softmax_before_mask", "softmax", text, {}, in_place(site, guesses))


def _coarse(site: Site) -> Iterator[Variant]:
    """Scores, or exponentials and their sum, rounded to 16 bits."""
    for text, dtype, change, tolerance in coarse(site.facts):
        guesses = [change(part.inputs["scores"]) for part in site.parts]
        yield Variant("softmax_low_precision", "precision", text, {"dtype": dtype}, guesses, 0, tolerance)


def coarse(facts: Facts) -> Iterator[tuple[str, str, Callable[[Array], Array], float]]:
    """(text, dtype, the softmax of scores in it, how far it may be off, relative)."""
    for dtype in ("bfloat16", "float16"):
        if facts.dtype == dtype:
            continue

        text = f"scores are rounded to {dtype} before the softmax"
        yield text, dtype, partial(_first_rounded, dtype), 0.0
        yield f"the softmax takes and gives {dtype}", dtype, partial(_both_rounded, dtype), UNIT[dtype]
        yield (
            f"exponentials and their sum are rounded to {dtype}",
            dtype,
            partial(_quotient, dtype),
            UNIT[dtype],
        )


def _low(dtype: str, x: Array) -> Array:
    return rounded(x, dtype).astype(np.float64)


def _first_rounded(dtype: str, scores: Array) -> Array:
    return softmax(_low(dtype, scores))


def _both_rounded(dtype: str, scores: Array) -> Array:
    return _low(dtype, _first_rounded(dtype, scores))


def _quotient(dtype: str, scores: Array) -> Array:
    parts = _low(dtype, powers(_low(dtype, scores)))
    return _low(dtype, parts / _low(dtype, _sum(parts)))
