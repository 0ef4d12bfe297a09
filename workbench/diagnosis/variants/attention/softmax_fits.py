"""Wrong attention probabilities with a number of their own: temperatures, attention sinks, truncation, dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lockstep.engine.config import ModelConfig
from lockstep.workbench.diagnosis.hypotheses.attention.softmaxes import shares
from lockstep.workbench.diagnosis.hypotheses.attention.tree import softmax
from lockstep.workbench.diagnosis.hypotheses.blocks import all_wrong_heads, in_place, places, scopes
from lockstep.workbench.diagnosis.hypotheses.fits import factor_of, known_number, resolution
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array


def softmax_fits(site: Site) -> Iterator[Variant]:
    """Variants of one layer's softmax on one rank, fitted over all passes."""
    if all(part.fits for part in site.parts):
        yield from _temperature(site)
        yield from _sinks(site)
        yield from _top_k(site)
        yield from _dropout(site)


def _of(
    name: str,
    text: str,
    site: Site,
    guesses: Sequence[Array],
    fitted: Mapping[str, object],
    parameters: int,
) -> Variant:
    return Variant(name, "softmax", text, fitted, in_place(site, guesses), parameters)


def _cells(site: Site) -> Iterator[tuple[int, int, Array]]:
    """(part, head, the cells [T, K] that count)."""
    scope = scopes(site)
    for i, head in places(site):
        part = site.parts[i]
        good = (
            scope[i][head]
            & np.isfinite(part.inputs["scores"][head])
            & (part.seen[head] > 1e-30)
            & (part.expected[head] > 1e-30)
        )
        if good.any():
            yield i, head, good


def _temperature(site: Site) -> Iterator[Variant]:
    """exp(a * score): another base, a temperature. a is fitted to the logarithms, up to a constant a row."""
    xs, ys, weights = [], [], []
    for i, head, good in _cells(site):
        part = site.parts[i]
        x, y = part.inputs["scores"][head], np.log(np.where(good, part.seen[head], 1.0))
        for row in np.flatnonzero(good.sum(1) > 1):
            cells, p = good[row], part.expected[head][row][good[row]]
            xs.append(x[row][cells] - np.average(x[row][cells], weights=p))
            ys.append(y[row][cells] - np.average(y[row][cells], weights=p))
            weights.append(p)
    if not xs:
        return
    x, y, w = (np.concatenate(each) for each in (xs, ys, weights))
    a = factor_of(x * np.sqrt(w), y * np.sqrt(w))
    if not math.isfinite(a) or not a or abs(a - 1) < resolution(site):
        return
    match = known_number(a, _meanings(site.facts.model), max(1e-3, resolution(site)))
    a, words = match or (a, f"scores are multiplied by {a:.5g} (a temperature of {1 / a:.5g})")
    given = [part.inputs["scores"] for part in site.parts]
    guesses = [softmax(np.where(np.isfinite(x), a * x, -np.inf)) for x in given]
    text = f"before the softmax {words}"
    yield _of("softmax_temperature", text, site, guesses, {"factor": a}, 0 if match else 1)


def _meanings(model: ModelConfig) -> list[tuple[float, str]]:
    usual = model.score_scale is None
    again = "divided by sqrt(head_dim)" if usual else f"multiplied by the configured {model.scale:.5g}"
    undone = "multiplied by sqrt(head_dim)" if usual else f"divided by the configured {model.scale:.5g}"
    return [
        (math.log2(math.e), "scores are multiplied by log2(e) as exp2 needs it, but exp follows"),
        (model.scale, f"scores are {again} once more"),
        (1 / model.scale, f"scores are {undone}"),
        (2.0, "scores are doubled"),
        (0.5, "scores are halved"),
    ]


def _sinks(site: Site) -> Iterator[Variant]:
    """A number of each head's own in the denominator (an attention sink), or in all rows the same share lost."""
    guesses = [part.expected.copy() for part in site.parts]
    sinks: dict[str, float] = {}
    shares: list[float] = []
    for head in all_wrong_heads(site):
        logs = []
        for i, h, good in _cells(site):
            if h == head:
                part = site.parts[i]
                for row in np.flatnonzero(good.any(1)):
                    kept = float(part.seen[head][row].sum())
                    shares.append(kept)
                    total = np.logaddexp.reduce(part.inputs["scores"][head][row])
                    logs.append(total + math.log(max(1 / kept - 1, 1e-300)) if kept > 0 else math.nan)
        if not logs or not np.isfinite(np.median(logs)):
            return
        sinks[str(head)] = float(np.median(logs))
        for guess, part in zip(guesses, site.parts, strict=True):
            total = np.logaddexp.reduce(part.inputs["scores"][head], axis=-1, keepdims=True)
            guess[head] = part.expected[head] * np.exp(-np.logaddexp(0.0, sinks[str(head)] - total))
    if sinks:
        text = (
            "each head's denominator holds one number more: an attention sink that this model does not have"
        )
        yield _of("softmax_sink", text, site, guesses, {"sinks": sinks}, len(sinks))
    if shares:
        ranks, share = len(site.taps.ranks), float(np.median(shares))
        known = [(ranks, ": summed over the ranks"), (1 / ranks, ": divided by the number of ranks")]
        match = known_number(share, known if ranks > 1 else [], 1e-3)
        text = f"probabilities add up to {share:.5g} instead of 1{match[1] if match else ''}"
        scaled = [part.expected * share for part in site.parts]
        yield _of("probs_scaled", text, site, scaled, {"sum": share}, 0 if match else 1)


def _top_k(site: Site) -> Iterator[Variant]:
    """Only the k likeliest keys, or those above a share, keep their probability."""
    counts, lost, kept = [], [], []
    for i, head, _ in _cells(site):
        part = site.parts[i]
        for row in np.flatnonzero(scopes(site)[i][head].any(1)):
            there = part.expected[head][row] > 1e-12
            zero = there & (part.seen[head][row] == 0)
            if zero.any():
                counts.append(int((there & ~zero).sum()))
                lost.append(float(part.expected[head][row][zero].max()))
                kept.append(float(part.expected[head][row][there & ~zero].min(initial=1.0)))
    if not counts:
        return
    if min(counts) == max(counts):
        kept_cells = [
            np.argsort(np.argsort(-part.expected, axis=-1), axis=-1) < counts[0] for part in site.parts
        ]
        text = f"only the {counts[0]} likeliest keys of each query are kept"
        fitted: dict[str, object] = {"k": counts[0]}
    elif max(lost) < min(kept):
        edge = math.sqrt(max(lost) * min(kept))
        kept_cells = [part.expected >= edge for part in site.parts]
        text, fitted = f"probabilities below some {edge:.2g} are set to zero", {"least": edge}
    else:
        return
    left = [np.where(cells, part.expected, 0.0) for cells, part in zip(kept_cells, site.parts, strict=True)]
    for words, guesses in (
        ("and made to add up to 1 again", [shares(x) for x in left]),
        ("and what is left does not add up to 1", left),
    ):
        yield _of("probs_truncated", f"{text}, {words}", site, guesses, fitted, 1)


def _dropout(site: Site) -> Iterator[Variant]:
    """Dropout left on: some probabilities are zero, all others larger by one factor."""
    ratios = []
    for i, head, good in _cells(site):
        ratios.append((site.parts[i].seen[head] / site.parts[i].expected[head])[good])
    if not ratios:
        return
    factor = float(np.median(np.concatenate(ratios)))
    if factor <= 1 + resolution(site):
        return
    guesses = [np.where(part.seen == 0, 0.0, part.expected * factor) for part in site.parts]
    dropped = [(part.seen == 0)[part.expected > 1e-12].mean() for part in site.parts if part.expected.size]
    rate = 1 - 1 / factor
    if abs(float(np.mean(dropped)) - rate) < 0.25:
        text = f"dropout is left on (rate {rate:.3g}): some are zero, the others {factor:.4g} times as large"
        yield _of("dropout", text, site, guesses, {"rate": rate}, 1)
