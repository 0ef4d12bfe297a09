"""What wrong attention scores may be instead of `scale * q . k`: other scales, operands, caps, heads.

Scores are [heads, T, K]; which cells the mask forbids is `mask`'s matter. Everything is fitted at once over all passes
at which a head is wrong: a decode step alone has a single row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.rotations import rotate
from lockstep.workbench.diagnosis.hypotheses.attention.scales import meanings, right_scale
from lockstep.workbench.diagnosis.hypotheses.attention.words import told
from lockstep.workbench.diagnosis.hypotheses.blocks import (
    all_wrong_heads,
    cached,
    history,
    of_scores,
    others,
    places,
    positions,
    products,
    shaped,
    unrotated,
    wrong_heads,
)
from lockstep.workbench.diagnosis.hypotheses.edits import Detail, Edit
from lockstep.workbench.diagnosis.hypotheses.fits import factor_of, resolution
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.attention import expand, soft_capped
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.expected import sum_noise
from lockstep.workbench.diagnosis.operations.rotary import frequencies, lengths_of
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Soft caps of published models; another one is fitted.
SOFT_CAPS = (50.0, 30.0, 20.0, 100.0)
#: Share of a cap up to which a score behind it tells what it was.
_STEEP = 0.95

_Raw = Sequence[Array | None]


def scores(site: Site) -> Iterator[Variant]:
    """Variants of the products of one layer on one rank."""
    if not all(part.fits for part in site.parts):
        return
    right: list[Array | None] = [products(part.inputs["q"], part.inputs["k"]) for part in site.parts]
    scale = site.facts.model.scale
    wrong = wrong_heads(site)
    yield from _scaled(site, right, scale)
    yield from _scales_of_heads(site, right, scale)
    yield from _log_scale(site, right, scale)
    yield from _soft_cap(site, right, scale)
    for name, text, raw in other_operands(site, right):
        if all(x is None or _alike(x, right[i]) for i, x in enumerate(raw) if wrong[i]):
            continue  # of a single token, say, many operands are the right ones
        yield Variant(name, "scores", text, {}, _masked(site, raw, scale))
        yield from _scaled(site, raw, scale, name, text)


def _alike(x: Array, y: Array | None) -> bool:
    return y is not None and x.shape == y.shape and np.allclose(x, y, rtol=1e-9, atol=1e-12)


def _masked(site: Site, raw: _Raw, scale: float) -> list[Array]:
    """Scores out of products, behind the model's cap, under the right mask."""
    return of_scores(site, _behind(raw, scale, site.facts.model.score_cap))


def _behind(raw: _Raw, scale: float, cap: float) -> list[Array | None]:
    """Scaled products behind a soft cap; 0: behind none."""
    scaled = [None if x is None else x * scale for x in raw]
    return [None if x is None else soft_capped(x, cap) for x in scaled]


def _cells(site: Site, raw: _Raw, only: int | None = None, *, uncapped: bool = True) -> tuple[Array, Array]:
    """(products, what was seen) of the wrong heads where the mask allows and all is finite; `uncapped`: what the
    model's cap made what was seen of, where it is not flat."""
    xs, ys, cap = [np.empty(0)], [np.empty(0)], site.facts.model.score_cap if uncapped else 0.0
    for index, head in places(site):
        part, x = site.parts[index], raw[index]
        if x is None or x.shape != part.seen.shape or only not in (None, head):
            continue
        seen = part.seen[head]
        cells = np.isfinite(part.expected[head]) & np.isfinite(seen) & np.isfinite(x[head])
        if cap:
            cells &= np.abs(seen) < _STEEP * cap
        xs.append(x[head][cells])
        ys.append(cap * np.arctanh(seen[cells] / cap) if cap else seen[cells])
    return np.concatenate(xs), np.concatenate(ys)


def _scaled(site: Site, raw: _Raw, scale: float, name: str = "scores", what: str = "") -> Iterator[Variant]:
    """Another factor in the place of the right one."""
    x, y = _cells(site, raw)
    factor = factor_of(x, y) if len(x) > 1 else scale
    if abs(factor / scale - 1) < resolution(site):
        return
    known = [(value, text) for value, text in meanings(site, scale)
             if math.isclose(factor, value, rel_tol=resolution(site), abs_tol=1e-6 * scale)]  # fmt: skip
    factor = known[0][0] if known else factor
    reported = (
        f"{factor:.5g} instead of {right_scale(site.facts.model)}, {factor / scale:.5g} times the right scale"
    )
    words = ", or ".join(text for _, text in known)
    text = f"{what + '; ' if what else ''}scores are scaled by {reported}{': ' + words if words else ''}"
    fitted = {"scale": factor, "ratio": factor / scale, "meanings": [text for _, text in known]}
    yield Variant(f"{name}_scale", "scores", text, fitted, _masked(site, raw, factor), 0 if known else 1)


def _scales_of_heads(site: Site, raw: _Raw, scale: float) -> Iterator[Variant]:
    """Every wrong head by a factor of its own."""
    factors = {head: factor_of(*_cells(site, raw, head)) for head in all_wrong_heads(site)}
    spread = [value / scale for value in factors.values()]
    if len(factors) < 2 or max(spread) - min(spread) < resolution(site) * max(map(abs, spread)):
        return
    guesses: list[Array | None] = []
    for x in raw:
        by = np.array([factors.get(head, scale) for head in range(0 if x is None else len(x))])
        guesses.append(None if x is None else x * by[:, None, None])
    ratios = {str(head): value / scale for head, value in factors.items()}
    yield Variant("scores_scale_of_heads", "scores", "each head's scores are scaled by a factor of its own",
                  {"ratios": ratios}, _masked(site, guesses, 1.0), len(factors))  # fmt: skip


def _log_scale(site: Site, raw: _Raw, scale: float) -> Iterator[Variant]:
    """Queries scaled by a multiple of the logarithm of their position, as some models do beyond the trained context."""
    grown: list[Array | None] = [
        None if x is None else x * scale * np.log(positions(part) + 1.0)[:, None]
        for x, part in zip(raw, site.parts, strict=True)
    ]
    x, y = _cells(site, grown)
    factor = factor_of(x, y) if len(x) > 7 else 0.0
    if factor > 0:
        length = math.exp(min(1 / factor, 700))
        text = f"scores are multiplied by log(position + 1) / log({length:.4g})"
        yield Variant(
            "scores_log_position", "scores", text, {"length": length}, _masked(site, grown, factor), 1
        )


def _soft_cap(site: Site, raw: _Raw, scale: float) -> Iterator[Variant]:
    """cap * tanh(score / cap), the cap found by bisection; and the scores without the model's own."""
    if site.facts.model.score_cap:
        yield _capped(site, raw, scale, 0.0)
    x, y = _cells(site, raw, uncapped=False)
    x = x * scale
    top = float(np.abs(x).max(initial=0.0))
    if len(x) < 2 or not top or np.abs(y).max() > top * (1 + resolution(site)):
        return
    low, high = 1e-2 * top, 1e4 * top
    for _ in range(100):  # the larger the cap, the larger what comes out
        cap = math.sqrt(low * high)
        low, high = (low, cap) if np.abs(cap * np.tanh(x / cap)) @ np.abs(y) > y @ y else (cap, high)
    known = [value for value in SOFT_CAPS if math.isclose(cap, value, rel_tol=1e-2)]
    yield _capped(site, raw, scale, known[0] if known else cap, 0 if known else 1)


def _capped(site: Site, raw: _Raw, scale: float, cap: float, parameters: int = 0) -> Variant:
    """Scores behind another soft cap than the model's; 0: behind none."""
    own = site.facts.model.score_cap
    detail: Detail = ("capped", cap) if cap else ("uncapped", own)
    words = told(site, [Edit("scores", "applied", detail)])
    guesses, noises = of_scores(site, _behind(raw, scale, cap)), []
    for part, x in zip(site.parts, raw, strict=True):
        q, k = part.inputs["q"], part.inputs["k"]
        terms = np.sqrt(products(q**2, k**2))  # where the own cap flattens, more is left than of it
        unit = 2 * site.facts.unit + sum_noise(site.facts, q.shape[-1])
        noises.append(unit * scale * np.hypot(terms if x is None else x, terms))
    return Variant(words.name, words.kind, words.text, words.fitted, guesses, parameters, noise=noises)


def other_operands(site: Site, right: _Raw) -> Iterator[tuple[str, str, _Raw]]:
    """Products of other operands than rotated queries and cached keys, as (name, text, [heads, T, K] a part)."""
    q = [part.inputs["q"] for part in site.parts]
    k = [part.inputs["k"] for part in site.parts]
    plain_q = _like(others(site, unrotated(site, "q")), q)
    plain_k = _like(history(site, unrotated(site, "k")), k)
    yield ("scores_transposed", "the scores are transposed: queries and keys are exchanged",
           [x.swapaxes(1, 2) if x is not None and x.shape[1] == x.shape[2] else None for x in right])  # fmt: skip
    yield "scores_unrotated_keys", "keys enter the scores without their rotation", _pairs(q, plain_k)
    yield "scores_unrotated_queries", "queries enter the scores without their rotation", _pairs(plain_q, k)
    yield (
        "scores_unrotated",
        "queries and keys enter the scores without their rotation",
        _pairs(plain_q, plain_k),
    )
    again_q = [_turn(site, part, x, positions(part)) for x, part in zip(q, site.parts, strict=True)]
    again_k = [_turn(site, part, x, np.arange(len(x))) for x, part in zip(k, site.parts, strict=True)]
    yield "scores_rotated_again", "attention rotates queries and keys once more", _pairs(again_q, again_k)
    yield (
        "scores_keys_rotated_again",
        "cached keys are rotated once more when they are read",
        _pairs(q, again_k),
    )
    yield "scores_queries_rotated_again", "attention rotates the queries once more", _pairs(again_q, k)
    yield ("scores_keys_one_behind", "each key stands one place too late: the cache is read one row behind",
           _pairs(q, [np.concatenate([0 * x[:1], x[:-1]]) for x in k]))  # fmt: skip
    yield ("scores_keys_one_ahead", "each key stands one place too early: the cache is read one row ahead",
           _pairs(q, [np.concatenate([x[1:], 0 * x[:1]]) for x in k]))  # fmt: skip
    yield ("scores_queries_one_ahead", "each query stands one row too early: the row after its own is read",
           _pairs([np.concatenate([x[1:], x[-1:]]) for x in q], k))  # fmt: skip
    yield ("scores_queries_one_behind", "each query stands one row too late: the row before its own is read",
           _pairs([np.concatenate([x[:1], x[:-1]]) for x in q], k))  # fmt: skip
    yield ("scores_newest_key_missing", "the newest key is not there yet: its row of the cache is read as zero",
           _pairs(q, [np.concatenate([x[:-1], 0 * x[:1]]) for x in k]))  # fmt: skip
    yield ("scores_newest_key_stale", "the newest key is not there yet: the one before it stands in its place",
           _pairs(q, [np.concatenate([x[:-1], x[-2:-1] if len(x) > 1 else x[-1:]]) for x in k]))  # fmt: skip
    norms = [
        [x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12) for x in side] for side in (q, k)
    ]
    for words, a, b in (("queries and keys", *norms), ("queries", norms[0], k), ("keys", q, norms[1])):
        text = f"{words} are divided by their lengths: cosines instead of products"
        yield "scores_normalised", text, _pairs(a, b)
    yield (
        "scores_heads_not_transposed",
        "q [T, heads, D] is read as [heads, T, D] without being transposed",
        [
            np.einsum("htd,khd->htk", x.reshape(x.shape[1], x.shape[0], -1), expand(y, x.shape[1]))
            for x, y in zip(q, k, strict=True)
        ],
    )
    values = _like(cached(site, "v"), k)
    yield "scores_of_values", "queries are multiplied with the values instead of the keys", _pairs(q, values)
    for layer in range(site.facts.model.num_layers):
        if layer != site.layer:
            text = f"queries are multiplied with the keys of layer {layer}"
            theirs = _like(cached(site, "k", layer), k)
            yield "scores_keys_of_layer", text, _pairs(q, theirs)
            text = f"the queries are those of layer {layer}"
            yield "scores_queries_of_layer", text, _pairs(_like(others(site, "attn.q_rope", layer), q), k)


def _like(found: Sequence[Array | None], right: Sequence[Array]) -> list[Array | None]:
    return [shaped(x, like) for x, like in zip(found, right, strict=True)]


def _pairs(q: Sequence[Array | None], k: Sequence[Array | None]) -> list[Array | None]:
    return [None if x is None or y is None else products(x, y) for x, y in zip(q, k, strict=True)]


def _turn(site: Site, part: Part, x: Array, at: NDArray[np.int64]) -> Array:
    """[N, heads, D] rotated by the model's angles at those positions, once more, in the pass of `part`."""
    return rotate(x, at[:, None, None] * frequencies(site.facts.model, lengths_of(part.rows[-1:])))
