"""Causes inside attention and at the cache: masks, heads, cache rows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, takewhile

import numpy as np
from numpy.typing import NDArray

from engine.taps.names import layer_of
from workbench.diagnosis.signatures.evidence import NOISE, Evidence, Signature
from workbench.diagnosis.signatures.linear import factor
from workbench.views.causes import Cause

_NEW = {"attn.k_cache": "attn.k_rope", "attn.v_cache": "attn.v_proj"}


def mask_nan(e: Evidence) -> Cause | None:
    """NaN exactly where the mask allows: 0 * -inf was added there."""
    seen, right = e.seen("attn.scores"), e.right("attn.scores")
    if seen is None or right is None or seen.shape != right.shape:
        return None
    nan, allowed = np.isnan(seen), np.isfinite(right)
    if not nan.any() or not (nan == allowed).all():
        return None
    text = f"NaN in exactly the {allowed.sum()} cells that the mask allows: 0 * -inf in an additive mask"
    return Cause("mask_zero_times_inf", text, {"nan": int(nan.sum()), "allowed": int(allowed.sum())}, 0.0)


def mask_differs(e: Evidence) -> Cause | None:
    """Scores are right wherever both masks allow; the masks are different ones."""
    seen, right = e.seen("attn.scores"), e.right("attn.scores")
    if seen is None or right is None or seen.shape != right.shape or np.isnan(seen).any():
        return None
    extra, lost = np.isfinite(seen) & ~np.isfinite(right), ~np.isfinite(seen) & np.isfinite(right)
    both = np.isfinite(seen) & np.isfinite(right)
    scale = float(np.linalg.norm(right[both])) or 1.0
    left = float(np.linalg.norm(seen[both] - right[both]))
    if not (extra.any() or lost.any()) or left > NOISE[e.engine.dtype] * scale:
        return None
    fitted = {"extra": int(extra.sum()), "lost": int(lost.sum())}
    return Cause("mask_differs", _mask_text(extra[0], lost[0]), fitted, left / scale)


def _mask_text(extra: NDArray[np.bool_], lost: NDArray[np.bool_]) -> str:
    """What the cells [T, K] of one head say that are seen though they should not be, and the other way."""
    new, keys = extra.shape
    distance = (
        np.arange(keys - new, keys)[:, None] - np.arange(keys)[None, :]
    )  # query position - key position
    if lost.any():
        return (
            f"{int(lost.sum())} cells a head are masked that should be seen, {int(extra.sum())} the other way"
        )
    if (distance[extra] < 0).all():
        return "tokens see later ones: the causal mask is missing"
    if (distance[extra] > 0).all():
        depths = np.unique(distance[extra])
        if len(depths) == 1:
            return f"the sliding window is one token too wide: keys {depths[0]} back are seen"
        return f"the sliding window is not applied: keys {depths[0]} and more back are seen"
    return f"{int(extra.sum())} cells a head are seen that should be masked"


def cache_not_used(e: Evidence) -> Cause | None:
    """A decode step attends to its own tokens alone."""
    if e.step == 0:
        return None
    for cache, new in _NEW.items():
        seen, right, fresh = e.seen(cache), e.right(cache), e.seen(new)
        if seen is None or right is None or fresh is None or len(seen) >= len(right):
            continue
        if seen.size != fresh.size:
            continue
        found = e.equals("cache_not_used", "attention reads only this step's keys and values, not the cache",
                         {"rows": len(seen), "expected": len(right)}, fresh.reshape(seen.shape), seen)  # fmt: skip
        if found:
            return found
    return _own_value(e)


def _own_value(e: Evidence) -> Cause | None:
    """The context of a one-token step is that token's own value, in every head."""
    seen, right, value = e.seen("attn.context"), e.right("attn.context"), e.right("attn.v_cache")
    if seen is None or right is None or value is None or seen.shape != right.shape or len(seen) != 1:
        return None
    if not np.isfinite(seen).all():
        return None
    heads = seen.shape[1] // value.shape[2]
    own = value[-1].repeat(heads // value.shape[1], axis=0).reshape(1, -1)
    return e.explains("cache_not_used", "attention returns the current token's own value: the cache is not read",
                      {"rows": 1, "expected": len(value)}, own, seen, right)  # fmt: skip


def cache_heads_repeated(e: Evidence) -> Cause | None:
    """The cache holds KV heads repeated for the query heads."""
    if e.kind not in _NEW:
        return None
    seen, right = e.seen(e.kind), e.right(e.kind)
    if seen is None or right is None or seen.shape[0] != right.shape[0] or seen.shape[2] != right.shape[2]:
        return None
    held, heads = seen.shape[1], right.shape[1]
    wanted = {held // heads} if held > heads and held % heads == 0 else set(range(2, heads + 1))
    for times in sorted(wanted):
        predicted = right[:, np.arange(held) // times]
        found = e.equals("cache_heads_repeated", f"each KV head is cached {times} times, as attention reads it",
                         {"times": times, "heads": held, "expected": heads}, predicted, seen)  # fmt: skip
        if found:
            return found
    return None


def cache_of_another_layer(e: Evidence) -> Cause | None:
    """The rows of earlier tokens are those that another layer has written."""
    pair, told = e.wrong_pair(), e.engine.sequences(e.step).get(e.seq)
    if e.kind not in _NEW or pair is None or told is None:
        return None
    seen, right = pair
    written = [position for position in told.positions if 0 <= position < len(seen)]
    for layer in takewhile(lambda i: e.golden.has_tap(f"layers.{i}.{e.kind}"), count()):
        other = e.golden.whole_or_none(f"layers.{layer}.{e.kind}", e.step, e.seq)
        if other is None or other.shape != seen.shape or layer == layer_of(e.tap):
            continue
        predicted = other.copy()
        predicted[written] = right[written]
        found = e.explains("cache_of_another_layer", f"earlier tokens' rows are layer {layer}'s: layers share a cache",
                           {"layer": layer}, predicted, seen, right)  # fmt: skip
        if found:
            return found
    return None


def cache_rows_wrong(e: Evidence) -> Cause | None:
    """Single rows of the cache are zero or hold another position's row."""
    pair = e.wrong_pair()
    if e.kind not in _NEW or pair is None:
        return None
    seen, right = pair
    flat, golden = seen.reshape(len(seen), -1), right.reshape(len(right), -1)
    noise = NOISE[e.engine.dtype] * np.sqrt((golden**2).sum(1).mean())
    wrong = np.flatnonzero(np.linalg.norm(flat - golden, axis=1) > noise)
    rows = np.concatenate([np.zeros_like(golden[:1]), golden])  # row 0: never written
    nearest = [int(np.argmin(np.linalg.norm(rows - flat[i], axis=1))) for i in wrong]
    if not len(wrong) or len(wrong) == len(seen):
        return None
    predicted = golden.copy()
    predicted[wrong] = rows[nearest]
    held = {int(i): None if j == 0 else j - 1 for i, j in zip(wrong, nearest, strict=True)}
    first, what = next(iter(held.items()))
    text = f"cache row {first} " + ("was never written" if what is None else f"holds position {what}'s row")
    return e.explains("cache_rows_wrong", text, {"rows": {str(k): v for k, v in held.items()}},
                      predicted.reshape(seen.shape), seen, right)  # fmt: skip


def heads_tiled(e: Evidence) -> Cause | None:
    """Query head h reads KV head h % n (on its rank) instead of h // group."""
    q, k = e.seen("attn.q_rope"), e.seen("attn.k_cache")
    seen, right = e.seen("attn.scores"), e.right("attn.scores")
    if q is None or k is None or seen is None or right is None or seen.shape != right.shape:
        return None
    heads, kv_heads, ranks = q.shape[1], k.shape[1], e.engine.ranks
    if heads == kv_heads or kv_heads % ranks or q.shape[2] != k.shape[2]:
        return None
    allowed = np.isfinite(right)
    if not (np.isfinite(seen) == allowed).all():
        return None
    local, local_kv = heads // ranks, kv_heads // ranks
    h = np.arange(heads)
    tiled = (h // local) * local_kv + (h % local) % local_kv
    products = np.einsum("thd,khd->htk", q, k[:, tiled])
    straight = np.einsum("thd,khd->htk", q, k[:, h // (heads // kv_heads)])[allowed]
    scale = float(straight @ right[allowed] / max(straight @ straight, np.finfo(float).tiny))
    text = "query head h reads KV head h % n instead of h // group"
    fitted = {"heads": heads, "kv_heads": kv_heads}
    predicted = (products * scale)[allowed]
    return e.explains("kv_heads_tiled", text, fitted, predicted, seen[allowed], right[allowed])


_CACHE: tuple[Signature, ...] = (
    cache_not_used,
    cache_heads_repeated,
    cache_of_another_layer,
    cache_rows_wrong,
)

ATTENTION: Mapping[str, tuple[Signature, ...]] = {
    **dict.fromkeys(("attn.k_cache", "attn.v_cache"), _CACHE),
    "attn.scores": (mask_nan, mask_differs, heads_tiled, cache_not_used, factor),
    "attn.probs": (cache_not_used, factor),
    "attn.context": (cache_not_used, factor),
}
