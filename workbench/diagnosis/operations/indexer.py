"""What an indexer of sparse attention should have given on recorded inputs, one pass of one sequence at a time.

Which keys are chosen is right or wrong; where scores are so close that rounding decides, either is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import FORMULAS, SCALED, evaluate, numbers_of
from lockstep.engine.graph.index_choice import best_keys, summed_heads
from lockstep.workbench.diagnosis.operations.attention import BLOCKS, AttentionPass, allowed
from lockstep.workbench.diagnosis.operations.expected import Operands, Result, floor
from lockstep.workbench.diagnosis.operations.facts import UNIT
from lockstep.workbench.diagnosis.recording import Array

#: Of whole numbers: so little that any other one is wrong.
_NO_NOISE = 0.01
#: What is less is a mask's.
_HIDDEN = -1e29


def index_scores(b: AttentionPass) -> Result:
    """Queries [T, heads, D], keys [K, 1, D] and weights [T, heads] -> [1, T, K], -inf where the mask forbids: products
    are summed in float32 whatever the model's dtype."""
    q, k, weights = (b.inputs[role] for role in ("q", "k", "weights"))
    numbers = numbers_of(b.facts.model)
    seen = allowed(b, len(k))
    out = evaluate(FORMULAS["index_scores"], {**numbers, **b.inputs, "allowed": seen})
    terms = evaluate(SCALED, {**numbers, "q": np.abs(q), "k": np.abs(k)})
    size = summed_heads(terms, np.abs(weights) * numbers["index_weight"])
    unit = min(b.facts.unit, UNIT["float32"])
    return out, floor(b.facts, unit * (4 + 0.5 * np.sqrt(q.shape[1] * q.shape[2])) * size)


def key_choice(b: AttentionPass) -> Result:
    """The chosen rows [T, S], which rounding does not move; `settled_keys` excuses ties."""
    found = best_keys(_scores_of(b)[0], numbers_of(b.facts.model)["index_top_k"])
    return found, np.full_like(found, _NO_NOISE)


def _scores_of(b: AttentionPass) -> Result:
    """By what keys are chosen, [1, T, K]: as recorded, or of what went in."""
    if "scores" not in b.inputs:
        scores, noise = index_scores(b)
        return scores, noise + b.slack * np.abs(np.where(np.isfinite(scores), scores, 0.0))
    scores = b.inputs["scores"]
    return np.where(scores > _HIDDEN, scores, -np.inf), np.spacing(np.abs(scores).astype(np.float32)).astype(
        float
    )


def shared_choice(o: Operands) -> Result:
    """Another layer's choice: nothing is computed."""
    out = np.sort(o.value("shared_choice"), -1)
    return out, np.full_like(out, _NO_NOISE)


def settled_scores(seen: Array, expected: Array) -> Array:
    """Scores with -inf wherever that was expected and what was seen is as good as that."""
    if seen.shape != expected.shape:
        return seen
    return np.where(np.isneginf(expected) & (seen < _HIDDEN), -np.inf, seen)


def settled_keys(b: AttentionPass, seen: Array, expected: Array) -> tuple[Array, Array]:
    """Seen and expected [T, S], ascending, and equal where those that were chosen are the best ones but for
    rounding."""
    seen = np.sort(seen, -1)
    if seen.shape != expected.shape:
        return seen, expected
    ((scores,), (noise,)), expected = _scores_of(b), expected.copy()
    for row in np.flatnonzero((seen != expected).any(-1)):
        if _as_good(
            scores[row], seen[row], expected[row], np.where(np.isfinite(noise[row]), noise[row], 0.0)
        ):
            expected[row] = seen[row]
    return seen, expected


def _as_good(scores: Array, seen: Array, expected: Array, noise: Array) -> bool:
    """Whether as many keys were chosen as should be, each once, and none of them has a score that is lower than that of
    another one but for their noise."""
    own = seen[seen >= 0]
    if len(own) != (expected >= 0).sum() or len(set(own.tolist())) != len(own) or (own >= len(scores)).any():
        return False
    picked: NDArray[np.bool_] = np.zeros(len(scores), dtype=bool)
    picked[own.astype(int)] = True
    return bool((scores + noise)[picked].min() >= (scores - noise)[~picked].max(initial=-np.inf))


#: What is computed one pass of one sequence at a time.
PASS_WISE: Mapping[str, Callable[[AttentionPass], Result]] = {
    **BLOCKS,
    "index_scores": index_scores,
    "key_choice": key_choice,
}
