"""Attention over keys in blocks whose parts were put together wrongly: sums, denominators, and blocks left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from workbench.diagnosis.operations.attention import expand
from workbench.diagnosis.operations.site import Site
from workbench.diagnosis.recording import Array
from workbench.diagnosis.variants.attention.softmax import divided
from workbench.diagnosis.variants.blocks import all_wrong_heads, in_place, places, scopes, usual_noise
from workbench.diagnosis.variants.variant import Variant

#: Sizes of blocks that are tried.
BLOCKS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512)

_Keys = NDArray[np.int64]


def _each(p: Array, blocks: _Keys) -> Array:
    """Probabilities that add up to 1 in each block that is seen."""
    return np.asarray(sum((divided(p * (blocks == i)) for i in np.unique(blocks)), np.zeros_like(p)))


def _seen(p: Array, blocks: _Keys) -> Array:
    """How many blocks each query sees, [heads, T, 1]."""
    there = [(p * (blocks == i)).sum(-1, keepdims=True) > 0 for i in np.unique(blocks)]
    return np.asarray(np.maximum(np.sum(there, axis=0), 1))


def _last(p: Array, blocks: _Keys) -> Array:
    """The newest block that each query sees, [heads, T, 1]."""
    return np.asarray(np.where(p > 0, blocks, -1).max(-1, keepdims=True))


#: What probabilities [heads, T, K] become where the keys [K] belong to those blocks: (words, form).
FORMS: tuple[tuple[str, Callable[[Array, _Keys], Array]], ...] = (
    ("each block's result, divided by its own sum, counts the same", lambda p, b: _each(p, b) / _seen(p, b)),
    ("the blocks' results, each divided by its own sum, are added up", _each),
    ("the newest block alone counts, divided by its own sum", lambda p, b: divided(p * (b == _last(p, b)))),
    ("the newest block is left out", lambda p, b: np.where((b == _last(p, b)) & (b > 0), 0.0, p)),
    (
        "the newest block is left out, the others are divided by their own sum",
        lambda p, b: np.where(_last(p, b) > 0, divided(np.where(b == _last(p, b), 0.0, p)), p),
    ),
    ("the first block alone counts, divided by its own sum", lambda p, b: divided(p * (b == 0))),
    ("only the first block is added up", lambda p, b: p * (b == 0)),
    (
        "the sum of the newest block alone is divided by",
        lambda p, b: p / np.maximum((p * (b == _last(p, b))).sum(-1, keepdims=True), 1e-300),
    ),
)


def split_contexts(site: Site) -> Iterator[Variant]:
    """Variants of one layer's context on one rank, of which the keys' parts have wrong shares."""
    if not all(part.fits for part in site.parts):
        return
    probs = [part.inputs["probs"] for part in site.parts]
    values = [expand(part.inputs["v"], len(p)) for part, p in zip(site.parts, probs, strict=True)]
    for text, guesses in _splits(probs):
        made = [
            np.einsum("htk,khd->thd", p, v, optimize=True).reshape(p.shape[1], -1)
            for p, v in zip(guesses, values, strict=True)
        ]
        yield Variant(
            "context_split_keys", "context", text, {}, in_place(site, made), noise=usual_noise(site)
        )


def split_softmaxes(site: Site) -> Iterator[Variant]:
    """Variants of one layer's softmax on one rank, over keys in blocks."""
    if all(part.fits for part in site.parts):
        for text, guesses in _splits([part.expected for part in site.parts]):
            yield Variant("softmax_split_keys", "softmax", text, {}, in_place(site, guesses))


def _splits(probs: Sequence[Array]) -> Iterator[tuple[str, list[Array]]]:
    most = max(p.shape[2] for p in probs)
    for size in (size for size in BLOCKS if size < most):
        for words, form in FORMS:
            text = f"keys are taken in blocks of {size}, which are put together wrongly: {words}"
            yield text, [np.asarray(form(p, np.arange(p.shape[2]) // size)) for p in probs]


def denominators(site: Site) -> Iterator[Variant]:
    """Each wrong row by a factor of its own: right exponentials, divided by something else than their sum."""
    if not all(part.fits for part in site.parts):
        return
    guesses, sums = [part.expected.copy() for part in site.parts], []
    scope = scopes(site)
    for i, head in places(site):
        part = site.parts[i]
        for row in np.flatnonzero(scope[i][head].any(1)):
            if (part.expected[head][row] > 0).sum() > 1:
                total = float(part.seen[head][row].sum())
                guesses[i][head][row] *= total
                sums.append(total)
    if sums and all_wrong_heads(site):
        text = (
            f"probabilities are right among each other, but rows add up to {min(sums):.4g} to {max(sums):.4g} "
            "instead of 1: terms are missing in the denominator, or it has others as well"
        )
        fitted = {"sums": sums[:16]}
        yield Variant("softmax_denominator", "softmax", text, fitted, guesses, len(sums))
