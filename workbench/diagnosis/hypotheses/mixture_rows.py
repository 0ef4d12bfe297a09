"""Experts in one kernel whose rows went elsewhere: with which weights each token's output sums up what all of its
layer's experts would give, read beside the weights that it should have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.expert_rows import moved_experts
from lockstep.workbench.diagnosis.hypotheses.mixture import operands_of, wrong_rows
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.mixture import ROOTS, MixtureValues
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Tokens whose weights are solved for.
_ROWS = 64
#: Of a weight, the share by which what stands for it may differ.
_ALIKE = 0.05


def other_experts_within(site: Site) -> Iterator[Variant]:
    """Rows through another expert than the one that was chosen, or through none."""
    if site.deviation is None or site.seen.shape != site.expected.shape or site.facts.model.experts is None:
        return
    values = MixtureValues(operands_of(site))
    ids, weights = (values.results[f"mlp.topk_{one}"][0] for one in ("ids", "weights"))
    held = np.isin(ids, list(site.held)) if site.held is not None else np.ones(ids.shape, dtype=bool)
    rows, count = wrong_rows(site, _ROWS), site.facts.model.experts.count
    if site.expected.shape[-1] < 2 * count:  # too few numbers to solve for each token
        return
    anywhere = MixtureValues(replace(values.operands, held=None))
    used = _weights_used(anywhere, rows, site.seen[rows] - _without_experts(values)[rows])
    moved = _moved(used, np.where(held, ids, -1)[rows], weights[rows])
    if not moved:
        return
    through = ids.copy()
    for one, other in moved.items():
        through[held & (ids == one)] = other
    kept = np.where(held & (through >= 0), weights, 0.0)
    inputs = {**values.operands.inputs, "mlp.topk_ids": np.maximum(through, 0.0), "mlp.topk_weights": kept}
    found = MixtureValues(replace(values.operands, inputs=inputs, held=None)).results[ROOTS[0]][0]
    yield moved_experts(moved, count, found)


def _without_experts(values: MixtureValues) -> Array:
    """What the sum has beside the experts' rows: the shared expert."""
    weights = np.zeros_like(values.results["mlp.topk_weights"][0])
    inputs = {
        **values.operands.inputs,
        "mlp.topk_weights": weights,
        "mlp.topk_ids": values.results["mlp.topk_ids"][0],
    }
    return MixtureValues(replace(values.operands, inputs=inputs)).results[ROOTS[0]][0]


def _weights_used(values: MixtureValues, rows: NDArray[np.intp], seen: Array) -> Array:
    """The weights [N, E] with which what all experts give those tokens comes nearest to what was seen [N, H]."""
    every = values.output_of_all(rows)
    return np.stack([np.linalg.lstsq(one.T, x, rcond=None)[0] for one, x in zip(every, seen, strict=True)])


def _moved(used: Array, ids: Array, weights: Array) -> Mapping[int, int]:
    """The expert, or -1: none, whose rows stand in for each of those whose rows are not its own."""
    found: dict[int, int] = {}
    for expert in sorted({int(one) for one in np.unique(ids) if one >= 0}):
        token, slot = np.nonzero(ids == expert)
        wanted = weights[token, slot][:, None]
        apart = np.linalg.norm(used[token] - wanted, axis=0)
        limit = _ALIKE * float(np.linalg.norm(wanted))
        if apart[expert] <= limit:
            continue
        if float(np.linalg.norm(used[token, expert])) <= limit and not (apart <= limit).any():
            found[expert] = -1
        elif apart.min() <= limit:
            found[expert] = int(apart.argmin())
    return found
