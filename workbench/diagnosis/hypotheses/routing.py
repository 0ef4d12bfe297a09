"""Hypotheses about routing to experts: edits of the formulas of choice, weights and sum, and rows that went through
another expert than they should have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import Node, numbers_of
from lockstep.engine.graph.routing import routed
from lockstep.workbench.diagnosis.hypotheses.edits import Edit, nodes, together
from lockstep.workbench.diagnosis.hypotheses.generate import Choices, edits_of
from lockstep.workbench.diagnosis.hypotheses.operands import formula_at
from lockstep.workbench.diagnosis.hypotheses.search import single
from lockstep.workbench.diagnosis.hypotheses.trial import Lazy, RowTrial
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.hypotheses.words import told
from lockstep.workbench.diagnosis.operations.experts import hit
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Operations whose hypotheses are made here.
ROUTED = ("choice", "choice_weights", "combine", "experts")
#: Leaves that are numbers, and other values that engines have.
_NUMBERS: Mapping[str, tuple[float, ...]] = {
    "groups": (1.0,), "top_groups": (1.0,), "top_k": (1.0,), "routed_factor": (1.0,), "ids": (),
}  # fmt: skip
#: Hypotheses that are told of a site.
_TOLD = 12
#: Of a row's error, the share that the right one of the experts leaves at most.
_LEAVES = 0.1
#: Multiplications up to which every expert is tried on a row of each.
_AFFORDABLE = 1 << 32


def routing_edits(site: Site) -> Iterator[Variant]:
    """Every single edit that explains something of what was seen, the nearest first."""
    if site.seen.shape != site.expected.shape:
        return
    formula, others = formula_at(site), _others(site)
    tokens: dict[str, Callable[[], Any]] = {role: partial(np.asarray, x) for role, x in site.inputs.items()}
    trial = RowTrial(site, formula, Lazy(tokens), Lazy(others))
    edits = (one for one in _edits(formula, others) if not (site.operation == "choice" and one.free))
    for solved in single(trial, edits)[:_TOLD]:
        tree, words = together(solved.edits, formula), told(site, solved.edits)
        noise = None if site.operation == "choice" else trial.noise_of(tree)
        yield Variant(
            words.name, words.kind, words.text, words.fitted, trial.whole(tree), solved.cost, noise=noise,
            edits=solved.edits,
        )  # fmt: skip


def _others(site: Site) -> dict[str, Callable[[], Any]]:
    """Leaves without an axis of tokens: the model's numbers, and the bias of its routers, which only choices read."""
    found: dict[str, Callable[[], Any]] = {
        name: partial(float, value) for name, value in numbers_of(site.facts.model).items()
    }
    name = f"model.layers.{site.layer}.mlp.gate.e_score_correction_bias"
    if (correction := site.facts.vector(name)) is not None:
        found["correction"] = partial(np.asarray, correction)
    return found


def _edits(formula: Node, others: Mapping[str, object]) -> Iterator[Edit]:
    """What routers get wrong, and every single edit of the formula."""
    for path, node in nodes(formula):
        match node.name:
            case "softmax" | "sigmoid" if node.args == (Node("logits"),):
                yield Edit(path, "function", ("sigmoid" if node.name == "softmax" else "softmax",))
                if "correction" in others:
                    yield Edit(path, "applied", ("plus", "correction", 1.0))
            case "taken" if not any(one.name == "shares" for _, one in nodes(formula)):
                yield Edit(path, "applied", ("shares",))
            case "weighed_sum":
                yield Edit(path, "function", ("unweighted_sum",))
    if any(node.name == "routed_factor" for _, node in nodes(formula)):
        yield Edit((), "applied", ("multiply", "routed_factor"))
    choices = Choices(numbers=_NUMBERS, orders=False)
    yield from (one for one in edits_of(formula, choices) if not (one.kind == "number" and one.free))


def other_experts(site: Site) -> Iterator[Variant]:
    """Rows through another expert's matrix than that of the one that was chosen, or through none."""
    experts, deviation = site.facts.model.experts, site.deviation
    if experts is None or deviation is None or site.seen.shape != site.expected.shape:
        return
    wrong, ids = deviation.scopes[0].any(-1), site.inputs["ids"]
    if len(hit(ids[wrong])) * experts.count * site.expected.shape[-1] * _rows(site).shape[-1] > _AFFORDABLE:
        return
    moved = {one: _instead(site, one, wrong & (ids == one), experts.count) for one in hit(ids[wrong])}
    known = {one: other for one, other in moved.items() if other is not None}
    if not known:
        return
    weight = {one: matrix for one, other in known.items() if (matrix := _matrix(site, other)) is not None}
    predicted = np.where(np.isin(ids, list(known))[..., None], 0.0, site.expected)
    predicted = predicted + routed(site.inputs["x"], weight, ids) if weight else predicted
    yield Variant(
        "experts_lost" if not weight else "experts_exchanged", "experts", _in_words(known, experts.count),
        {"experts": {str(one): other for one, other in known.items()}}, predicted,
    )  # fmt: skip


def other_matrix(site: Site) -> Iterator[Variant]:
    """Gate's matrices of all experts in place of up's, or the reverse."""
    name = site.weights.get("weight", "")
    swaps = ((".gate_proj.", ".up_proj."), (".w1.", ".w3."))
    other = next((name.replace(*pair) for one in swaps for pair in (one, one[::-1]) if pair[0] in name), None)
    if other is None or site.seen.shape != site.expected.shape:
        return
    ids = site.inputs["ids"]
    found = {one: matrix for one in hit(ids) if (matrix := _matrix(site, one, other)) is not None}
    held = np.abs(site.expected).max(-1, keepdims=True) > 0  # by this rank
    text = f"{other.split('.')[-2]} of each expert is used instead of {name.split('.')[-2]}"
    predicted = np.where(held, routed(site.inputs["x"], found, ids), 0.0)
    yield Variant("weight_of_sibling", "weight", text, {"weight": name, "is": other}, predicted)


def _rows(site: Site) -> Array:
    """What each token's experts read, [N, S, in]."""
    x, ids = site.inputs["x"], site.inputs["ids"]
    return np.broadcast_to(x[:, None], (*ids.shape, x.shape[-1])) if x.ndim == 2 else x


def _matrix(site: Site, expert: int, name: str = "") -> NDArray[Any] | None:
    """The rank's part of an expert's matrix; None of none."""
    found = site.facts.weight((name or site.weights["weight"]).format(expert)) if expert >= 0 else None
    if found is None:
        return None
    found = found if site.span is None else found[site.span]
    return found if site.columns is None else found[:, site.columns]


def _instead(site: Site, expert: int, rows: NDArray[np.bool_], count: int) -> int | None:
    """The expert through which the rows of another went, -1: none; None where no expert gives what was seen."""
    token, slot = (int(one[0]) for one in np.nonzero(rows))
    seen, x = site.seen[token, slot], _rows(site)[token, slot]
    error = float(np.linalg.norm(seen - site.expected[token, slot]))
    if not seen.any():
        return -1
    left = {
        other: float(np.linalg.norm(seen - matrix.astype(np.float64) @ x))
        for other in range(count)
        if other != expert and (matrix := _matrix(site, other)) is not None and matrix.shape[1] == len(x)
    }
    best = min(left, key=left.__getitem__, default=None)
    return best if best is not None and left[best] <= _LEAVES * error else None


def _in_words(moved: Mapping[int, int], count: int) -> str:
    lost = [one for one, other in moved.items() if other < 0]
    through = {one: other for one, other in moved.items() if other >= 0}
    texts = []
    if through:
        steps, sums = (
            {(other - one) % count for one, other in through.items()},
            {a + b for a, b in through.items()},
        )
        if len(through) > 1 and len(steps) == 1:
            texts.append(f"rows go through the expert {steps.pop()} after the chosen one, of {count}")
        elif len(through) > 2 and len(sums) == 1:
            texts.append(
                f"rows go through the experts in reverse order: {sums.pop()} less the chosen one's number"
            )
        else:
            told_of = ", ".join(f"{one} through {other}" for one, other in list(through.items())[:6])
            texts.append(f"rows go through another expert than the chosen one: those of {told_of}")
    if lost:
        numbers = ", ".join(map(str, lost[:8]))
        texts.append(f"rows of expert{'s' * (len(lost) > 1)} {numbers} are computed by nobody: zeros")
    return "; ".join(texts)
