"""What a wrong context may be instead of probabilities times values: other values, other probabilities, another order of
its heads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from workbench.diagnosis.operations.attention import expand
from workbench.diagnosis.operations.blocks import (
    all_wrong_heads,
    by_head,
    from_heads,
    history,
    in_place,
    others,
    places,
    scopes,
    shaped,
)
from workbench.diagnosis.operations.scores import factor_of, resolution
from workbench.diagnosis.operations.site import Site
from workbench.diagnosis.operations.variant import Variant
from workbench.diagnosis.recording import Array


def contexts(site: Site) -> Iterator[Variant]:
    """Variants of one layer's context on one rank."""
    if not all(part.fits for part in site.parts):
        return
    probs = [part.inputs["probs"] for part in site.parts]
    values = [part.inputs["v"] for part in site.parts]
    yield from _values(site, probs, values)
    yield from _probabilities(site, probs, values)
    yield from _layouts(site)
    yield from _factors(site)


def _times(probs: Array | None, values: Array | None) -> Array | None:
    """[heads, T, K] times [K, kv_heads, D] -> [T, heads * D]; None where they do not fit."""
    if probs is None or values is None or values.ndim != 3 or probs.shape[2] != len(values) or len(probs) % values.shape[1]:
        return None
    out = np.einsum("htk,khd->thd", probs, expand(values, len(probs)), optimize=True)
    return np.asarray(out.reshape(len(out), -1))


def _of(
    name: str, text: str, site: Site, guesses: Sequence[Array | None], fitted: dict[str, object] | None = None, parameters: int = 0
) -> Variant:
    return Variant(name, "context", text, fitted or {}, in_place(site, guesses), parameters)


def _all(site: Site, probs: Sequence[Array], values: Sequence[Array | None]) -> list[Array | None]:
    return [_times(p, v) for p, v in zip(probs, values, strict=True)]


def _values(site: Site, probs: Sequence[Array], values: Sequence[Array]) -> Iterator[Variant]:
    """Other values under the right probabilities."""
    keys = [shaped(k, v) for k, v in zip(others(site, "attn.k_cache"), values, strict=True)]
    yield _of("context_of_keys", "probabilities are multiplied with the keys instead of the values", site, _all(site, probs, keys))
    for name, text, moved in (
        ("context_values_behind", "values are read one row behind: each key brings the value of the token before",
         [np.concatenate([0 * v[:1], v[:-1]]) for v in values]),
        ("context_values_ahead", "values are read one row ahead: each key brings the value of the token after",
         [np.concatenate([v[1:], 0 * v[:1]]) for v in values]),
        ("context_values_rolled", "values are read one row behind, the first one from the end",
         [np.roll(v, 1, axis=0) for v in values]),
        ("context_values_reversed", "values are read in reversed order", [v[::-1] for v in values]),
        ("context_newest_value_missing", "the newest value is not there yet: its row is read as zero",
         [np.concatenate([v[:-1], 0 * v[:1]]) for v in values]),
    ):  # fmt: skip
        yield _of(name, text, site, _all(site, probs, list(moved)))
    for layer in range(site.facts.model.num_layers):
        if layer != site.layer:
            theirs = [shaped(x, v) for x, v in zip(others(site, "attn.v_cache", layer), values, strict=True)]
            yield _of("context_values_of_layer", f"values are those of layer {layer}", site, _all(site, probs, theirs), {"layer": layer})
    stale = [_stale(site, i, v) for i, v in enumerate(values)]
    yield _of("context_values_stale", "values are those of the step before: the newest rows are not there yet", site, _all(site, probs, stale))
    written = [shaped(x, v) for x, v in zip(history(site, "attn.v_proj"), values, strict=True)]
    yield _of("context_values_written", "values are those that were projected, not those that the cache holds", site, _all(site, probs, written))
    passes = site.taps.passes
    for seq in sorted({one.seq for one in passes}):
        at = {one.step: i for i, one in enumerate(passes) if one.seq == seq}
        tensors = site.taps.tensors(site.near("attn.v_cache"), site.rank)
        foreign: list[Array | None] = []
        for index, v in zip(site.passes, values, strict=True):
            x = tensors[at[passes[index].step]] if passes[index].seq != seq and passes[index].step in at else None
            longer = x is not None and x.ndim == 3 and len(x) >= len(v)
            foreign.append(x[: len(v)] if longer and x is not None else None)
        if any(x is not None for x in foreign):
            yield _of("context_values_of_sequence", f"values are those of sequence {seq}", site, _all(site, probs, foreign), {"sequence": seq})


def _stale(site: Site, i: int, right: Array) -> Array | None:
    """The cache of the sequence's step before, with zeros for the rows that it lacks."""
    passes, index = site.taps.passes, site.passes[i]
    before = [j for j in range(index) if passes[j].seq == passes[index].seq]
    held = site.taps.tensors(site.near("attn.v_cache"), site.rank)[before[-1]] if before else None
    if held is None or held.shape[1:] != right.shape[1:] or len(held) > len(right):
        return None
    return np.concatenate([held, np.zeros_like(right[len(held) :])])


def _probabilities(site: Site, probs: Sequence[Array], values: Sequence[Array]) -> Iterator[Variant]:
    """Other weights for the right values."""
    square = [p.swapaxes(1, 2) if p.shape[1] == p.shape[2] else None for p in probs]
    yield _of("context_probs_transposed", "the probabilities are transposed: queries and keys are exchanged", site,
              [_times(p, v) for p, v in zip(square, values, strict=True)])  # fmt: skip
    scores = [None if x is None or x.shape != p.shape else np.where(np.isfinite(x), x, 0.0)
              for x, p in zip(others(site, "attn.scores"), probs, strict=True)]  # fmt: skip
    yield _of("context_of_scores", "values are weighted by the scores: the softmax is left out", site,
              [_times(p, v) for p, v in zip(scores, values, strict=True)])  # fmt: skip
    forms = [
        ("context_own_value", "each token gets its own value: no other one is attended to, nor the cache", _newest),
        ("context_first_value", "each token gets the value of the first one", lambda p: _hot(p, np.zeros(p.shape[1], dtype=int))),
        ("context_mean", "each token gets the mean of the values that it may see: probabilities are not used", _flat),
        ("context_hard", "each token gets the value of its likeliest key alone", lambda p: _hot(p, p.argmax(-1))),
        ("context_mean_of_heads", "all heads use the mean of the heads' probabilities", lambda p: np.broadcast_to(p.mean(0), p.shape)),
    ]  # fmt: skip
    for name, text, form in forms:
        yield _of(name, text, site, [_times(form(p), v) for p, v in zip(probs, values, strict=True)])
    own = [_times(_of_the_step(p), v) for p, v in zip(probs, values, strict=True)]
    yield _of("context_of_the_step", "only the values of this step's tokens are added up: those of the cache are left out", site, own)
    yield _of("context_of_the_step", "only this step's tokens are attended to: their probabilities add up to 1 without the cache", site,
              [_times(_normal(_of_the_step(p)), v) for p, v in zip(probs, values, strict=True)])  # fmt: skip


def _newest(p: Array) -> Array:
    return _hot(p, p.shape[2] - p.shape[1] + np.arange(p.shape[1]))


def _hot(p: Array, keys: Array) -> Array:
    hot = np.zeros_like(p)
    np.put_along_axis(hot, np.broadcast_to(keys, p.shape[:2])[..., None].astype(np.int64), 1.0, axis=-1)
    return hot


def _flat(p: Array) -> Array:
    return _normal((p > 0).astype(float))


def _of_the_step(p: Array) -> Array:
    return p * (np.arange(p.shape[2]) >= p.shape[2] - p.shape[1])


def _normal(p: Array) -> Array:
    total = p.sum(-1, keepdims=True)
    return np.asarray(p / np.where(total == 0, 1.0, total))


def _layouts(site: Site) -> Iterator[Variant]:
    """The right numbers in other places."""
    heads = [by_head(site, part.expected) for part in site.parts]  # [heads, T, D]
    yield _of("context_tokens_not_transposed", "[heads, T, D] is flattened without being transposed: tokens and heads are mixed up",
              site, [x.reshape(x.shape[1], -1) for x in heads])  # fmt: skip
    yield _of("context_heads_by_dim", "heads are merged as [D, heads] instead of [heads, D]", site,
              [x.transpose(1, 2, 0).reshape(x.shape[1], -1) for x in heads])  # fmt: skip
    yield _of("context_heads_by_dim", "[heads, D] is read as [D, heads] and transposed", site,
              [x.swapaxes(0, 1).reshape(x.shape[1], x.shape[2], x.shape[0]).swapaxes(1, 2).reshape(x.shape[1], -1) for x in heads])  # fmt: skip
    kv_heads = [part.inputs["v"].shape[1] for part in site.parts]
    yield _of("context_groups_transposed", "heads are merged as [group, KV heads] instead of [KV heads, group]", site,
              [from_heads(site, x.reshape(n, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)) for x, n in zip(heads, kv_heads, strict=True)])  # fmt: skip
    half = site.facts.model.head_dim // 2
    yield _of("context_halves_exchanged", "the halves of each head are exchanged", site,
              [from_heads(site, np.roll(x, half, axis=2)) for x in heads])  # fmt: skip
    yield _of("context_tokens_reversed", "tokens stand in reversed order", site, [from_heads(site, x[:, ::-1]) for x in heads])
    yield _of("context_of_token_before", "each token has the context of the token before", site,
              [from_heads(site, np.concatenate([x[:, :1] * 0, x[:, :-1]], axis=1)) if x.shape[1] > 1 else None for x in heads])  # fmt: skip
    yield _of("context_of_last_token", "all tokens have the context of the last one", site,
              [from_heads(site, np.broadcast_to(x[:, -1:], x.shape)) for x in heads])  # fmt: skip


def _factors(site: Site) -> Iterator[Variant]:
    """Heads that are zero, or larger by a factor."""
    scope, factors = scopes(site), {}
    for head in all_wrong_heads(site):
        x, y = [np.empty(0)], [np.empty(0)]
        for i, h in places(site):
            if h == head:
                cells = scope[i][head] & np.isfinite(by_head(site, site.parts[i].seen)[head])
                x.append(by_head(site, site.parts[i].expected)[head][cells])
                y.append(by_head(site, site.parts[i].seen)[head][cells])
        factors[head] = factor_of(np.concatenate(x), np.concatenate(y))
    if not factors:
        return
    common = float(np.median(list(factors.values())))
    for by, count in ((dict.fromkeys(factors, common), 1), (factors, len(factors))):
        guesses = []
        for part in site.parts:
            made = by_head(site, part.expected).copy()
            for head, factor in by.items():
                made[head] = made[head] * (0.0 if abs(factor) < resolution(site) else factor)
            guesses.append(from_heads(site, made))
        zero = all(abs(factor) < resolution(site) for factor in by.values())
        if zero:
            yield _of("context_heads_zero", f"heads {sorted(by)} are zero: their context is never written", site, guesses, {"heads": sorted(by)})
            return
        ranks = len(site.taps.ranks)
        near = next((f": {words}" for value, words in ((ranks, "the number of ranks"), (1 / ranks, "1 / the number of ranks"))
                     if value != 1 and math.isclose(common, value, rel_tol=resolution(site))), "")  # fmt: skip
        text = f"the context is {common:.5g} times what it should be{near}" if count == 1 else "each head's context is scaled by a factor of its own"
        name = "context_scaled" if count == 1 else "context_scale_of_heads"
        yield _of(name, text, site, guesses, {"factors": {str(h): f for h, f in by.items()}}, 0 if near and count == 1 else count)
        if max(factors.values()) - min(factors.values()) < resolution(site):
            return
