"""Attention over keys in parts that were joined wrongly, and denominators that are no sum of all.

A context is held against the results of the parts of its keys before the forms of joining them are tried: where no
weights of theirs give it, none of the forms does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.blocks import all_wrong_heads, by_head, places, scopes
from lockstep.workbench.diagnosis.hypotheses.variant import UNEXPLAINED, Variant
from lockstep.workbench.diagnosis.operations.attention import expand
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.attention.inside import Guess, Inside, Rows
from lockstep.workbench.diagnosis.variants.attention.key_parts import (
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
    if not all(part.fits for part in site.parts):
        return
    inside, known = Inside(site), set()
    of = "context" if inside.values(0) is not None else "softmax"
    for words, split in splits(max(inside.probs(i).shape[2] for i in range(len(site.parts)))):
        cut = [parts_of(inside, i, split) for i in range(len(site.parts))]
        key = tuple(each.tobytes() for each in cut)
        if key in known or not any(each.any() for each in cut):
            continue
        known.add(key)
        if not _in_reach(inside, cut):
            continue
        text = f"attention runs over the keys {words}, whose results are joined wrongly"
        for reported, form in FORMS:
            yield inside.variant(f"{of}_split_keys", of, f"{text}: {reported}", _guess(inside, cut, form))
        if of == "context":
            yield from _by_fitted_weights(inside, cut, text)


def parts_of(inside: Inside, i: int, split: Split) -> Parts:
    return np.asarray(split(inside.probs(i).shape[2], len(inside.site.parts[i].rows)), dtype=np.int64)


def _guess(inside: Inside, cut: list[Parts], form: Form) -> Guess:
    def guess(i: int, rows: Rows) -> tuple[Array, Array | None]:
        shares = Shares(inside.probs(i)[:, rows], cut[i])
        return shares.of_keys(form(shares)), inside.values(i)

    return guess


def _in_reach(inside: Inside, cut: list[Parts]) -> bool:
    """Whether some weights of the parts' results give what was seen in a few wrong rows."""
    left = error = 0.0
    for sample in inside.sample:
        results = results_of(inside, sample.part, sample.rows, cut[sample.part])
        seen = by_head(inside.site, sample.seen)
        rest = seen - np.einsum("htn,htnd->htd", _weights(results, seen), results)
        cells = by_head(inside.site, sample.cells)
        left, error = left + float(np.square(rest[cells]).sum()), error + sample.error
    return bool(left <= (UNEXPLAINED**2) * error)


def results_of(inside: Inside, i: int, rows: Rows, parts: Parts) -> Array:
    """What each part adds to the context, or to the probabilities, [heads, rows, n, D]."""
    shares, values = Shares(inside.probs(i)[:, rows], parts), inside.values(i)
    own = shares.probs[:, :, None] * shares.members
    if values is None:
        return own
    return np.asarray(np.einsum("htnk,khd->htnd", own, expand(values, len(own)), optimize=True))


def _weights(results: Array, seen: Array) -> Array:
    """The weights [heads, T, n] by which results [heads, T, n, D] come nearest to what was seen [heads, T, D]."""
    square = results @ results.swapaxes(-1, -2)
    size = np.trace(square, axis1=-2, axis2=-1)[..., None, None]
    square = square + (_RIDGE * size + 1e-300) * np.eye(square.shape[-1])
    return np.asarray(np.linalg.solve(square, results @ seen[..., None])[..., 0])


def _by_fitted_weights(inside: Inside, cut: list[Parts], text: str) -> Iterator[Variant]:
    """Two parts of the keys, each right by itself, in other shares than theirs, whatever rule gave these."""
    if max(int(parts.max()) for parts in cut) != 1:
        return
    site, ratios = inside.site, []
    guesses, scope = [part.expected for part in site.parts], scopes(site)
    for i in inside.wrong_parts:
        rows = np.arange(len(site.parts[i].rows))
        results = results_of(inside, i, rows, cut[i])
        mass = Shares(inside.probs(i), cut[i]).mass
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
