"""Attention over keys in parts that were joined wrongly, and denominators that are no sum of all.

A context is held against the results of the parts of its keys before the forms of joining them are tried: where no
weights of theirs give it, none of the forms does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.attention.tree import GROSS, AttentionTree, Change, Given, Made
from lockstep.workbench.diagnosis.hypotheses.attention.trials import judged, tried, worded
from lockstep.workbench.diagnosis.hypotheses.blocks import all_wrong_heads, by_head, places, scopes
from lockstep.workbench.diagnosis.hypotheses.setting import Wording
from lockstep.workbench.diagnosis.hypotheses.variant import UNEXPLAINED, Variant
from lockstep.workbench.diagnosis.operations.attention import FUSED
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.attention.key_parts import (
    DENOMINATORS,
    FORMS,
    Form,
    Parts,
    Shares,
    Split,
    splits,
)

#: Relative size of what keeps weights of parts finite that have the same result.
_RIDGE = 1e-12


def split_keys(site: Site) -> Iterator[Variant]:
    """Variants of one layer's probabilities, or of its context, of which the keys' parts have wrong shares."""
    if not judged(site):
        return
    tree, known = AttentionTree.of(site), set()
    right = [tree.make(one, {}) for one in tree.sample]
    of = "context" if "context" in tree.points else "softmax"
    divided = "softmax" if site.operation in FUSED else of
    forms = (*((of, *form) for form in FORMS), *((divided, *form) for form in DENOMINATORS))
    for words, split in splits(max(one.raw.shape[2] for one in tree.given)):
        cut = [parts_of(one, split) for one in tree.given]
        key = tuple(each.tobytes() for each in cut)
        if key in known or not any(each.any() for each in cut):
            continue
        known.add(key)
        if not _in_reach(tree, right, cut):
            continue
        text = f"attention runs over the keys {words}, whose results are joined wrongly"
        wording = (
            (Wording(f"{kind}_split_keys", kind, f"{text}: {how}", {}), form) for kind, how, form in forms
        )
        yield from tried(tree, (worded(one, {"probs": _joined(cut, form)}) for one, form in wording))
        if of == "context":
            yield from _by_fitted_weights(tree, cut, text)


def parts_of(given: Given, split: Split) -> Parts:
    """The part of each key of a pass, [K]."""
    return np.asarray(split(given.raw.shape[2], given.new), dtype=np.int64)


def _joined(cut: list[Parts], form: Form) -> Change:
    def change(probs: Array, given: Given) -> Array:
        shares = Shares(probs, cut[given.part])
        return shares.of_keys(form(shares))

    return change


def _in_reach(tree: AttentionTree, right: list[Made], cut: list[Parts]) -> bool:
    """Whether some weights of the parts' results give what was seen in a few wrong rows."""
    left = error = 0.0
    for one, made in zip(tree.sample, right, strict=True):
        results = results_of(made, cut[one.part])
        seen, wanted = (by_head(tree.site, x) for x in (one.seen, one.right))
        cells = by_head(tree.site, one.scope)
        rest = seen - np.einsum("htn,htnd->htd", _weights(results, seen), results)
        left, error = (
            total + float(np.square(np.minimum(np.abs(x[cells]), GROSS)).sum())
            for total, x in ((left, rest), (error, seen - wanted))
        )
    return bool(left <= (UNEXPLAINED**2) * error)


def results_of(made: Made, parts: Parts) -> Array:
    """What each part adds to the context, or to the probabilities, [heads, rows, n, D]."""
    own = made.probs[:, :, None] * Shares(made.probs, parts).members
    if made.values is None:
        return own
    return np.asarray(np.einsum("htnk,khd->htnd", own, made.values, optimize=True))


def _weights(results: Array, seen: Array) -> Array:
    """The weights [heads, T, n] by which results [heads, T, n, D] come nearest to what was seen [heads, T, D]."""
    square = results @ results.swapaxes(-1, -2)
    size = np.trace(square, axis1=-2, axis2=-1)[..., None, None]
    square = square + (_RIDGE * size + 1e-300) * np.eye(square.shape[-1])
    return np.asarray(np.linalg.solve(square, results @ seen[..., None])[..., 0])


def _by_fitted_weights(tree: AttentionTree, cut: list[Parts], text: str) -> Iterator[Variant]:
    """Two parts of the keys, each right by itself, in other shares than theirs, whatever rule gave these."""
    if max(int(parts.max()) for parts in cut) != 1:
        return
    site, ratios = tree.site, []
    guesses, scope = [part.expected for part in site.parts], scopes(site)
    for i in tree.wrong:
        right = tree.make(tree.given[i], {})
        results, mass = results_of(right, cut[i]), Shares(right.probs, cut[i]).mass
        both = (mass > 0).sum(-1) > 1
        weights = np.where(both[..., None], _weights(results, by_head(site, site.parts[i].seen)), 1.0)
        made = np.einsum("htn,htnd->htd", weights, results)
        guesses[i] = made.swapaxes(0, 1).reshape(site.parts[i].seen.shape)
        if both.any():
            ratios.append((weights * mass)[scope[i].any(-1) & both])
    found = np.concatenate(ratios) if ratios else np.empty((0, 2))
    if len(found) and (np.abs(found.sum(-1) - 1) < 1e-3).all():
        reported = f"their shares add up to 1, but are wrong (the first has {found[0, 0]:.4g} in the first wrong row)"
        yield Variant("context_split_keys", "context", f"{text}: {reported}", {"share": float(found[0, 0])}, guesses,
                      len(found))  # fmt: skip


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
