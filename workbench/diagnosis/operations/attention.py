"""What attention and its cache should have given on recorded inputs, one pass of one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import formula
from lockstep.engine.graph.formula import FORMULAS, SCALED, evaluate, softmax_beside
from lockstep.workbench.diagnosis.operations.expected import Lacking, Result, capped_noise, floor, sum_noise
from lockstep.workbench.diagnosis.operations.facts import UNIT, Facts
from lockstep.workbench.diagnosis.recording import Array


@dataclass(frozen=True, slots=True)
class AttentionPass:
    """One pass of one sequence. `positions` of its T queries; the last of K keys is the newest query's, or, where there
    are more than positions, the first stands at 0. `window` in tokens, None where all keys are seen. `slack`: relative
    noise that the terms of a score have from before, where queries or keys were not recorded as they went in."""

    facts: Facts
    inputs: Mapping[str, Array]
    positions: NDArray[np.int64]
    window: int | None
    slack: float = 0.0


def cache(b: AttentionPass) -> Result:
    """What was written so far, [K, kv_heads, D]."""
    written = b.inputs["written"]
    return written, floor(b.facts, b.facts.unit * np.abs(written))


def scores(b: AttentionPass) -> Result:
    """q [T, heads, D] and keys [K, kv_heads, D] -> [heads, T, K], scaled, -inf where the mask forbids."""
    q, k = b.inputs["q"], expand(b.inputs["k"], b.inputs["q"].shape[1])
    scale, cap = b.facts.model.scale, b.facts.model.score_cap
    out = evaluate(SCALED, {"q": q, "k": k, "scale": scale})
    terms = np.sqrt(np.einsum("thd,khd->htk", q**2, k**2, optimize=True)) * scale
    # Some engines scale the queries first: one more rounding of each term.
    noise = (2 * b.facts.unit + sum_noise(b.facts, q.shape[2]) + b.slack) * np.hypot(out, terms)
    noise = capped_noise(b.facts, out, noise, cap)
    return np.where(allowed(b, k.shape[0]), soft_capped(out, cap), -np.inf), floor(b.facts, noise)


def soft_capped(scores: Array, cap: float) -> Array:
    """Finite scores behind a soft cap (arXiv:2408.00118); 0: behind none."""
    return np.where(np.isfinite(scores), cap * np.tanh(scores / cap), scores) if cap else scores


def uncapped(scores: Array, cap: float) -> Array:
    """What the cap made them of."""
    if not cap:
        return scores
    most = 1 - 1e-15
    inside = np.clip(scores / cap, -most, most)
    return np.where(np.isfinite(scores), cap * np.arctanh(inside), scores)


def allowed(b: AttentionPass, keys: int) -> NDArray[np.bool_]:
    """Which keys [T, K] a query may see."""
    first = max(0, int(b.positions.max(initial=-1)) + 1 - keys)  # a cache may hold the newest keys alone
    seen = cells_seen(
        b.positions[:, None], (first + np.arange(keys))[None, :], b.window, b.facts.model.chunked
    )
    return seen if "chosen" not in b.inputs else seen & chosen_cells(b.inputs["chosen"], keys)


def chosen_cells(chosen: Array, keys: int) -> NDArray[np.bool_]:
    """Which of so many keys an indexer has chosen, [T, K], by their numbers [T, S]."""
    cells = np.zeros((len(chosen), keys), dtype=bool)
    rows, slots = np.nonzero((chosen >= 0) & (chosen < keys))
    cells[rows, chosen[rows, slots].astype(int)] = True
    return cells


def cells_seen(
    queries: NDArray[np.int64], keys: NDArray[np.int64], window: int | None, chunked: bool
) -> NDArray[np.bool_]:
    """Which keys, by their positions, the queries at theirs see: none after themselves, of a window the last so many,
    themselves among them, of a chunk those of their own."""
    seen = np.asarray(keys <= queries)
    if window is None:
        return seen
    return seen & (queries // window == keys // window if chunked else queries - keys < window)


def visible(facts: Facts, scores: Array, share: float = 1.0) -> NDArray[np.bool_]:
    """Which cells have a probability that is not zero beside their row's largest: what a mask of -inf, of a dtype's
    least number or of -1e9 hides is not among them. `share` of the way down to zero is far enough."""
    depth = share * (746.0 if facts.dtype == "float64" else 105.0)  # exp of less is zero
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf, where=~np.isnan(scores))
    with np.errstate(invalid="ignore"):
        return np.asarray(np.isnan(scores) | (scores >= top - depth) & (scores > -np.inf))


def settled(b: AttentionPass, seen: Array, expected: Array) -> Array:
    """Scores with -inf wherever that was expected and what was seen leaves no probability either, or is what the mask
    makes of a product that is not finite, to which it is added."""
    if seen.shape != expected.shape:
        return seen
    q, k = b.inputs["q"], expand(b.inputs["k"], b.inputs["q"].shape[1])
    spoilt = [np.isnan(x.sum(-1) * 0).T for x in (q, k)]  # [heads, T], [heads, K]
    added = np.isnan(seen) & (spoilt[0][:, :, None] | spoilt[1][:, None, :])
    shown = visible(b.facts, np.where(added, -np.inf, seen)) & ~added
    return np.where(shown | ~np.isneginf(expected), seen, -np.inf)


def softmax(b: AttentionPass) -> Result:
    """Over the keys, in float32 at least; beside sinks the maximum is taken off in the scores' own dtype, by some."""
    given, sinks = b.inputs["scores"], b.inputs.get("sinks")
    top = given.max(-1, keepdims=True, initial=-np.inf)
    out = probabilities(given, sinks)
    depth = np.where(np.isfinite(given), np.abs(given - top), 0.0)
    inside = b.facts.sum_unit * (4 + depth + np.abs(np.where(np.isfinite(top), top, 0.0)))
    if sinks is not None:
        inside = inside + b.facts.unit * (depth + np.abs(sinks).max(initial=0.0))
    return out, floor(b.facts, out * (b.facts.unit + inside) + UNIT["float32"] * 1e-6)


def probabilities(scores: Array, sinks: Array | None) -> Array:
    """Of masked scores [heads, T, K], and each head's sink where there are any."""
    if sinks is None:
        return np.asarray(evaluate(FORMULAS["softmax"], {"scores": scores}))
    return softmax_beside(scores, sinks)


def own_sinks(facts: Facts, weights: Mapping[str, str], heads: int, rank: int) -> dict[str, Array]:
    """The sinks of a rank's heads, by role; none of a model without."""
    if "sinks" not in weights:
        return {}
    found = facts.vector(weights["sinks"])
    if found is None or len(found) % heads:
        raise Lacking(f"the checkpoint has no {weights['sinks']} for {heads} heads")
    start = rank * heads % len(found)
    return {"sinks": found[start : start + heads]}


def of_hidden_rows(scores: Array, seen: Array, expected: Array) -> Array:
    """Probabilities [heads, T, K] that were expected, with what an engine gave to queries that may see no key, where
    that is nothing, or the same to all that get some: what guards of kernels, and masks of a finite number, come to."""
    if seen.shape != expected.shape:
        return expected
    hidden = (scores == -np.inf).all(-1)
    top = seen.max(-1, keepdims=True, initial=0.0)
    alike = ((seen == 0) | (np.abs(seen - top) <= 1e-2 * top)).all(-1)
    return np.where((hidden & alike)[..., None], seen, expected)


def attended(b: AttentionPass) -> dict[str, Array]:
    """The inputs q, k (and v) of a fused attention, with the scores that they should give inside, how far off those may
    be, and the probabilities."""
    given, noise = scores(b)
    probs = softmax(_of_scores(b, given))[0]
    return {
        **b.inputs,
        "scores": given,
        "score_noise": np.where(np.isfinite(given), noise, 0.0),
        "probs": probs,
    }


def _of_scores(b: AttentionPass, given: Array) -> AttentionPass:
    return replace(b, inputs={**b.inputs, "scores": given})


def weights(b: AttentionPass) -> Result:
    """Probabilities [heads, T, K] straight from q and k."""
    probs, moved = _moved(b)
    return weighed(b.facts, probs, moved, None)


def attention(b: AttentionPass) -> Result:
    """q [T, heads, D] with keys and values [K, kv_heads, D] -> [T, heads * D]: softmax(scores) times values, where
    scores and probabilities may be rounded on the way, or not."""
    probs, moved = _moved(b)
    return weighed(b.facts, probs, moved, b.inputs["v"])


def _moved(b: AttentionPass) -> tuple[Array, Array]:
    """Probabilities, and how far each may be off, relative: by its score's noise and by its own."""
    given, noise = scores(b)
    probs, inside = softmax(_of_scores(b, given))
    own = np.divide(inside, probs, out=np.zeros_like(probs), where=probs > 0)
    return probs, np.hypot(np.where(np.isfinite(given) & np.isfinite(noise), noise, 0.0), own)


def weighed(facts: Facts, probs: Array, moved: Array, values: Array | None) -> Result:
    """What probabilities [heads, T, K] that are `moved` by so much give: the context [T, heads * D] of values
    [K, kv_heads, D], or, without values, themselves."""
    square = (probs * moved) ** 2
    if values is None:
        total = (probs * moved**2).sum(-1, keepdims=True)  # all of a row move with its sum
        return probs, floor(facts, np.sqrt(square + probs**2 * total) + UNIT["float32"] * 1e-6)
    out, noise = context(AttentionPass(facts, {"probs": probs, "v": values}, np.empty(0, np.int64), None))
    # A score that is off moves the context towards its key's value, or away: by p * (v - context).
    v, heads = expand(values, len(probs)), out.reshape(len(out), len(probs), -1)
    first = np.einsum("htk,khd->thd", square, v**2, optimize=True)
    second = np.einsum("htk,khd->thd", square, v, optimize=True)
    apart = first - 2 * heads * second + heads**2 * square.sum(-1).T[..., None]
    return out, np.hypot(noise, np.sqrt(np.maximum(apart, 0.0)).reshape(out.shape))


def context(b: AttentionPass) -> Result:
    """probs [heads, T, K] times values [K, kv_heads, D] -> [T, heads * D]."""
    probs = b.inputs["probs"]
    values = expand(b.inputs["v"], len(probs))
    if values.shape[0] != probs.shape[2]:
        raise Lacking(f"{values.shape[0]} cached values do not fit probabilities of {probs.shape[2]} keys")
    out, terms = (
        evaluate(FORMULAS["context"], {"probs": p, "v": v})
        for p, v in ((probs, values), (probs**2, values**2))
    )
    noise = (b.facts.unit + sum_noise(b.facts, probs.shape[2])) * np.hypot(out, np.sqrt(terms))
    if (latent := b.facts.model.latent) is not None:
        # Values may have been made of what the probabilities weigh, then without the roundings of those recorded.
        sizes = np.broadcast_to((values**2).mean(-1, keepdims=True), values.shape)
        apart = np.sqrt(evaluate(FORMULAS["context"], {"probs": probs**2, "v": sizes}))
        noise = np.hypot(noise, (b.facts.unit + sum_noise(b.facts, latent.kv_rank)) * apart)
    return out, floor(b.facts, noise)


def expand(kv: Array, heads: int) -> Array:
    """Keys or values [K, kv_heads, D] for each of `heads` query heads: head h reads KV head h // group."""
    if kv.ndim != 3 or heads % kv.shape[1]:
        raise Lacking(f"cached rows of shape {list(kv.shape)} do not fit {heads} query heads")
    return formula.expand(kv, heads)


BLOCKS: Mapping[str, Callable[[AttentionPass], Result]] = {
    "cache": cache,
    "scores": scores,
    "softmax": softmax,
    "context": context,
    "weights": weights,
    "attention": attention,
}

#: Attention that engines run in one kernel, of which nothing in between is recorded.
FUSED = ("weights", "attention")
