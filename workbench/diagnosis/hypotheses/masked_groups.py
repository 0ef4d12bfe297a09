"""Experts of groups that are out of the choice, but not by as much as they should be."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.engine.graph.formula import evaluate, numbers_of
from lockstep.engine.graph.routing import candidates
from lockstep.workbench.diagnosis.hypotheses.edits import Edit
from lockstep.workbench.diagnosis.hypotheses.operands import formula_at
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.hypotheses.words import wording
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array


def masked_groups(site: Site) -> Iterator[Variant]:
    """Their scores are 0, which is above those that biases make negative. Experts of equal scores are as good as each
    other: of these those that were chosen."""
    experts = site.facts.model.experts
    if experts is None or experts.groups == 1 or site.seen.shape != site.expected.shape:
        return
    correction = site.facts.vector(site.weights["correction"]) if "correction" in site.weights else None
    given = {**numbers_of(site.facts.model), **site.inputs, "correction": correction}
    scores = np.asarray(evaluate(formula_at(site).args[0], given))
    masked = candidates(scores, experts.groups, experts.top_groups, experts.group_best, outside=0.0)
    edit = Edit((), "applied", ("masked_by_zero",))
    words = wording(site, (edit,))
    predicted = _settled(masked, site.seen, site.expected.shape[-1])
    yield Variant(words.name, words.kind, words.text, words.fitted, predicted, edits=(edit,))


def _settled(scores: Array, seen: Array, count: int) -> Array:
    """The numbers [N, S] of the best experts by scores [N, E], of equal ones those that were seen."""
    picked = np.zeros(scores.shape)
    known = np.clip(np.nan_to_num(seen), 0, scores.shape[1] - 1).astype(np.int64)
    np.put_along_axis(picked, known, 1.0, -1)
    best = np.lexsort((-picked, -scores), axis=-1)[:, :count]
    return np.sort(best, -1).astype(np.float64)
