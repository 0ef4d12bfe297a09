"""What a mixture of experts should have given on recorded inputs, and how far rounding may move it.

Which experts are chosen is right or wrong; where two of them are so close that rounding decides, either is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import evaluate, numbers_of
from lockstep.engine.graph.routing import added_to_rows, chosen, routed
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.sizes import size_of
from lockstep.engine.taps.flow import near
from lockstep.engine.taps.names import layer_of
from lockstep.workbench.diagnosis.operations.expected import Lacking, Operands, Result, floor, sum_noise
from lockstep.workbench.diagnosis.operations.facts import UNIT, Facts, spread
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.recording import Array

#: Roundings of float32 that a score may have behind it: of the softmax or sigmoid, and of the correction.
_ROUNDINGS = 16
#: Of whole numbers: so little that any other one is wrong.
_NO_NOISE = 0.01


def choice(o: Operands) -> Result:
    """The numbers of the experts, which rounding does not move; `settled_choice` excuses ties."""
    found = o.value("choice", correction=_correction(o))
    return found, np.full_like(found, _NO_NOISE)


def settled_choice(o: Operands, seen: Array, expected: Array) -> tuple[Array, Array]:
    """Seen and expected [N, S], with the experts of each token in the order of their numbers, and equal where those
    that were chosen are the best ones but for rounding."""
    seen, experts = np.sort(seen, -1), o.facts.model.experts
    if seen.shape != expected.shape or experts is None:
        return seen, expected
    odd = np.flatnonzero((seen != expected).any(-1))
    possible = ((seen >= 0) & (seen < experts.count) & (seen == np.floor(seen))).all(-1)
    expected = expected.copy()
    for row in odd[possible[odd]]:
        scores = _scores(o, row)
        picked = np.zeros(experts.count, dtype=bool)
        picked[seen[row].astype(int)] = True
        slack = _ROUNDINGS * UNIT["float32"] * (np.abs(scores) + np.abs(scores).max())
        nudged = scores + np.where(picked, slack, -slack)
        if np.array_equal(
            chosen(nudged[None], experts.top_k, experts.groups, experts.top_groups, experts.group_best)[0],
            seen[row],
        ):
            expected[row] = seen[row]
    return seen, expected


def near_ties(o: Operands, noise: Array) -> NDArray[np.bool_]:
    """The rows in which rounding, and the `noise` of the logits, decides which experts are chosen."""
    experts, scores = o.facts.model.experts, _scores(o, slice(None))
    assert experts is not None, "there is a choice"
    slack = _ROUNDINGS * UNIT["float32"] * np.abs(scores).max(-1, keepdims=True) + noise
    best = -np.sort(-scores, -1)[:, experts.top_k - 1 : experts.top_k + 1]
    return np.asarray((best[:, :1] - best[:, -1:] <= 2 * slack).any(-1))


def _scores(o: Operands, rows: int | slice) -> Array:
    """By what the experts of tokens are chosen, [E] each."""
    given = {**numbers_of(o.facts.model), "logits": o.inputs["logits"][rows], "correction": _correction(o)}
    return np.asarray(evaluate(o.formula("choice").args[0], given))


def _correction(o: Operands) -> Array | float:
    return o.weight("correction").astype(np.float64) if "correction" in o.weights else 0.0


def expert_input(o: Operands) -> Result:
    """What each of a token's experts reads: the token's row times its weight."""
    out = o.value("expert_input")
    return out, floor(o.facts, o.facts.unit * np.abs(out))


def choice_weights(o: Operands) -> Result:
    """What is multiplied by what the chosen experts give."""
    scale = (
        {"expert_scale": o.weight("expert_scale").astype(np.float64)} if "expert_scale" in o.weights else {}
    )
    out = o.value("choice_weights", **scale)
    return out, floor(o.facts, (o.facts.unit + _ROUNDINGS * UNIT["float32"]) * np.abs(out))


def experts(o: Operands) -> Result:
    """Rows through the matrices of their experts; zeros of those that the rank does not hold."""
    x, ids = o.inputs["x"], o.inputs["ids"]
    weight = expert_matrices(o.facts, o.weights["weight"], hit(ids, o.held))
    weight = {expert: _cut(matrix, o.span, o.columns) for expert, matrix in weight.items()}
    if any(matrix.shape[1] != x.shape[-1] for matrix in weight.values()):
        raise Lacking(f"its input of shape {list(x.shape)} does not fit the experts' weights")
    width = next((len(one) for one in weight.values()), _width(o))
    out, size = np.zeros((*ids.shape, width)), np.zeros((*ids.shape, width))
    if weight:
        out += routed(x, weight, ids)
    rows = np.broadcast_to(x[:, None], (*ids.shape, x.shape[-1])) if x.ndim == 2 else x
    for expert, matrix in weight.items():
        here = ids == expert
        size[here] = np.hypot(out[here], spread(rows[here], matrix))
    noise = (o.facts.unit + sum_noise(o.facts, x.shape[-1])) * size
    if "bias" in o.weights:
        bias = expert_matrices(o.facts, o.weights["bias"], hit(ids, o.held))
        bias = {expert: _cut(vector, o.span, None) for expert, vector in bias.items()}
        size_of_bias = np.abs(added_to_rows(np.zeros_like(out), bias, ids))
        out = added_to_rows(out, bias, ids)
        noise = noise + o.facts.unit * (size_of_bias + np.abs(out))
    return out, floor(o.facts, noise)


def _width(o: Operands) -> int:
    """Features that a rank has of an expert where no token goes to one of its own."""
    if o.span is not None:
        return int(o.span.stop - o.span.start)
    return 0 if o.declared is None else size_of(o.declared.width, o.facts.model)


def _cut(matrix: NDArray[Any], span: slice | None, columns: slice | None) -> NDArray[Any]:
    matrix = matrix if span is None else matrix[span]
    return matrix if columns is None else matrix[:, columns]


def hit(ids: Array, held: range | None = None) -> list[int]:
    """The experts that any token goes to, of those that a rank has."""
    return [int(one) for one in np.unique(ids[np.isfinite(ids)]) if held is None or int(one) in held]


def expert_matrices(facts: Facts, name: str, wanted: list[int]) -> Mapping[int, NDArray[Any]]:
    """Those experts' matrices; `name` has `{}` for the number of one. Lacking where one is not there."""
    count = facts.model.experts.count if facts.model.experts is not None else 0
    found: dict[int, NDArray[Any]] = {}
    for expert in wanted:
        matrix = facts.weight(name.format(expert)) if 0 <= expert < count else None
        if matrix is None and 0 <= expert < count:
            raise Lacking(f"the checkpoint has no {name.format(expert)}")
        if matrix is not None:
            found[expert] = matrix
    return found


def combine(o: Operands) -> Result:
    """The weighted sum of what a token's experts give, and the shared one's."""
    out = o.value("combine")
    x, weights = np.abs(o.inputs["x"]), np.abs(o.inputs.get("weights", np.ones(o.inputs["x"].shape[:2])))
    terms = np.einsum("nsh,ns->nh", x, weights, optimize=True)
    size = np.abs(out) + terms
    if "shared" in o.inputs:
        size = size + 3 * np.abs(o.inputs["shared"])  # of the sigmoid, the product and the sum
    return out, floor(o.facts, o.facts.unit * size)


def expert_groups(tap: str, taps: RecordedTaps) -> int:
    """Among how many groups of ranks the experts of the tap's layer are divided."""
    rows = near("mlp.experts.up", layer_of(tap), 0)
    return taps.recording.layout(rows).groups if taps.has(rows) else 1


def held_experts(tap: str, rank: int, taps: RecordedTaps, facts: Facts) -> range | None:
    """The experts that a rank has, by the layout of their rows; None: all."""
    groups = expert_groups(tap, taps)
    if groups == 1 or facts.model.experts is None or len(taps.ranks) % groups:
        return None
    held = shards.held_experts(facts.model, len(taps.ranks), rank, groups)
    return range(held.start, held.stop)
