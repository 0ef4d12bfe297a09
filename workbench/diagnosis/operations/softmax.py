"""What wrong attention probabilities may be instead of a softmax over the keys, on the scores that were recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from workbench.diagnosis.operations.blocks import (
    all_wrong_heads,
    in_place,
    places,
    products,
    scopes,
    others,
)
from workbench.diagnosis.operations.facts import rounded
from workbench.diagnosis.operations.scores import factor_of, resolution
from workbench.diagnosis.operations.site import Site
from workbench.diagnosis.operations.variant import Variant
from workbench.diagnosis.recording import Array


def softmaxes(site: Site) -> Iterator[Variant]:
    """Variants of one layer's softmax on one rank."""
    if not all(part.fits for part in site.parts):
        return
    given = [part.inputs["scores"] for part in site.parts]
    right = [part.expected for part in site.parts]
    yield _of("softmax_over_queries", "the softmax runs over the queries, not over the keys", site, [softmax(x, 1) for x in given])
    yield _of("softmax_over_heads", "the softmax runs over the heads, not over the keys", site, [softmax(x, 0) for x in given])
    yield _of("softmax_not_normalised", "the exponentials are not divided by their sum", site, [_powers(x) for x in given])
    yield _of("softmax_not_normalised", "the exponentials of the scores (their maximum not subtracted) are not divided by their sum",
              site, [np.exp(x) for x in given])  # fmt: skip
    yield _of("softmax_missing", "the scores themselves are used: there is no softmax", site, [np.where(np.isfinite(x), x, 0.0) for x in given])
    yield _of("softmax_plus_one", "1 is added to the denominator: a token may attend to nothing", site,
              [np.exp(x) / (1 + np.exp(x).sum(-1, keepdims=True)) for x in given])  # fmt: skip
    yield _of("softmax_plus_one", "1 is added to the sum of exponentials after the maximum was subtracted", site,
              [_powers(x) / (1 + _powers(x).sum(-1, keepdims=True)) for x in given])  # fmt: skip
    yield _of("softmax_twice", "the softmax is taken twice", site, [softmax(np.where(np.isfinite(x), p, -np.inf)) for x, p in zip(given, right, strict=True)])
    yield _of("softmax_twice", "the softmax is taken twice, the second time over masked keys as well", site, [softmax(p) for p in right])
    yield _of("softmax_mean_over_heads", "all heads have the mean of the probabilities", site,
              [np.broadcast_to(p.mean(0, keepdims=True), p.shape) for p in right])  # fmt: skip
    yield _of("probs_uniform", "all keys that may be seen have the same probability: scores are not used", site,
              [softmax(np.where(np.isfinite(x), 0.0, -np.inf)) for x in given])  # fmt: skip
    yield _of("probs_hard", "the likeliest key has all of the probability: an argmax in the place of the softmax", site,
              [(p == p.max(-1, keepdims=True)).astype(float) for p in right])  # fmt: skip
    yield _of("probs_transposed", "queries and keys are exchanged in the probabilities", site, [p.swapaxes(1, 2) for p in right])
    yield _of("probs_of_newest_key", "the newest key has all of the probability", site, [_one_hot(p, -1) for p in right])
    yield _of("probs_of_first_key", "the first key has all of the probability", site, [_one_hot(p, 0) for p in right])
    yield _of("relu_instead_of_softmax", "scores below zero are cut off, and the rest is divided by its sum", site,
              [_divided(np.where(np.isfinite(x), np.maximum(x, 0), 0)) for x in given])  # fmt: skip
    yield from _before_the_mask(site)
    yield from _temperature(site)
    yield from _sinks(site)
    yield from _top_k(site)
    yield from _dropout(site)
    yield from _coarse(site)


def softmax(x: Array, axis: int = -1) -> Array:
    return _divided(_powers(x, axis), axis)


def _powers(x: Array, axis: int = -1) -> Array:
    """Exponentials of the distance to the maximum; 0 where all is -inf."""
    top = x.max(axis, keepdims=True)
    return np.exp(x - np.where(np.isfinite(top), top, 0.0))


def _divided(x: Array, axis: int = -1) -> Array:
    total = x.sum(axis, keepdims=True)
    return np.asarray(x / np.where(total == 0, 1.0, total))


def _one_hot(p: Array, key: int) -> Array:
    """All on one key; the newest that a query may see, or the first one."""
    hot = np.zeros_like(p)
    if key == 0:
        hot[..., 0] = 1.0
        return hot
    t, k = p.shape[1:]
    hot[:, np.arange(t), k - t + np.arange(t)] = 1.0
    return hot


def _of(
    name: str, text: str, site: Site, guesses: Sequence[Array | None], fitted: dict[str, object] | None = None, parameters: int = 0
) -> Variant:
    return Variant(name, "softmax", text, fitted or {}, in_place(site, guesses), parameters)


def _before_the_mask(site: Site) -> Iterator[Variant]:
    """Probabilities over all keys, of which the masked ones were set to zero afterwards."""
    q, k = others(site, "attn.q_rope"), others(site, "attn.k_cache")
    scale, guesses = site.facts.model.head_dim**-0.5, []
    for a, b, part in zip(q, k, site.parts, strict=True):
        if a is None or b is None:
            return
        raw = products(a, b) * scale
        guesses.append(softmax(raw) * np.isfinite(part.inputs["scores"]) if raw.shape == part.expected.shape else None)
    yield _of("softmax_before_mask", "the softmax ran before the mask: later tokens take a share that nobody gets", site, guesses)


def _cells(site: Site) -> Iterator[tuple[int, int, Array]]:
    """(part, head, the cells [T, K] that count)."""
    scope = scopes(site)
    for i, head in places(site):
        part = site.parts[i]
        good = scope[i][head] & np.isfinite(part.inputs["scores"][head]) & (part.seen[head] > 1e-30) & (part.expected[head] > 1e-30)
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
    if not math.isfinite(a) or abs(a - 1) < resolution(site):
        return
    dim = site.facts.model.head_dim
    known = [(math.log(2), "powers of 2 are taken instead of e"), (math.log2(math.e), "scores are multiplied by log2(e), as exp2 needs, and exp follows"),
             (dim**-0.5, "scores are divided by sqrt(head_dim) once more"), (dim**0.5, "scores are multiplied by sqrt(head_dim)"),
             (-1.0, "the sign of the scores is turned"), (2.0, "scores are doubled"), (0.5, "scores are halved")]  # fmt: skip
    match = next(((value, words) for value, words in known if math.isclose(a, value, rel_tol=max(1e-3, resolution(site)))), None)
    a, words = match or (a, f"scores are multiplied by {a:.5g} (a temperature of {1 / a:.5g})" if a else "scores are zeroed")
    guesses = [softmax(np.where(np.isfinite(part.inputs["scores"]), a * part.inputs["scores"], -np.inf)) for part in site.parts]
    yield _of("softmax_temperature", f"before the softmax {words}", site, guesses, {"factor": a}, 0 if match else 1)


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
        yield _of("softmax_sink", "each head's denominator holds a number more, an attention sink that this model does not have",
                  site, guesses, {"sinks": sinks}, len(sinks))  # fmt: skip
    if shares:
        share = float(np.median(shares))
        words = {site.taps.recording.ranks: "summed over the ranks", 1 / site.taps.recording.ranks: "divided by the number of ranks"}
        told = next((text for value, text in words.items() if math.isclose(share, value, rel_tol=1e-3) and value != 1), "")
        text = f"probabilities add up to {share:.5g} instead of 1{': ' + told if told else ''}"
        yield _of("probs_scaled", text, site, [part.expected * share for part in site.parts], {"sum": share}, 0 if told else 1)


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
        kept_cells = [np.argsort(np.argsort(-part.expected, axis=-1), axis=-1) < counts[0] for part in site.parts]
        text, fitted = f"only the {counts[0]} likeliest keys of each query are kept", {"k": counts[0]}
    elif max(lost) < min(kept):
        edge = math.sqrt(max(lost) * min(kept))
        kept_cells = [part.expected >= edge for part in site.parts]
        text, fitted = f"probabilities below some {edge:.2g} are set to zero", {"least": edge}
    else:
        return
    for again in (True, False):
        guesses = [np.where(cells, part.expected, 0.0) for cells, part in zip(kept_cells, site.parts, strict=True)]
        words = "and made to add up to 1 again" if again else "and what is left does not add up to 1"
        yield _of("probs_truncated", f"{text}, {words}", site, [_divided(x) if again else x for x in guesses], dict(fitted), 1)


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
    if abs(float(np.mean(dropped)) - (1 - 1 / factor)) < 0.25:
        text = f"dropout is left on: the probabilities kept are {factor:.4g} times as large, the others zero (rate {1 - 1 / factor:.3g})"
        yield _of("dropout", text, site, guesses, {"rate": 1 - 1 / factor}, 1)


def _coarse(site: Site) -> Iterator[Variant]:
    """Scores, or exponentials and their sum, rounded to 16 bits."""
    for dtype, words in (("bfloat16", "bfloat16"), ("float16", "float16")):
        if site.facts.dtype == dtype:
            continue
        given = [rounded(part.inputs["scores"], dtype).astype(np.float64) for part in site.parts]
        yield Variant("softmax_low_precision", "precision", f"scores are rounded to {words} before the softmax", {"dtype": dtype}, [softmax(x) for x in given])
        powers = [rounded(_powers(x), dtype).astype(np.float64) for x in given]
        sums = [rounded(x.sum(-1, keepdims=True), dtype).astype(np.float64) for x in powers]
        guesses = [rounded(x / total, dtype).astype(np.float64) for x, total in zip(powers, sums, strict=True)]
        unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
        yield Variant("softmax_low_precision", "precision", f"the softmax is computed in {words}", {"dtype": dtype}, guesses, tolerance=2 * unit)



