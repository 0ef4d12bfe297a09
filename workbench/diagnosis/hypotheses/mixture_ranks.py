"""Experts that are divided among ranks, in one kernel, of which the sum alone was recorded: a rank's term that is not
in it, or no sum at all. Terms are made of the checkpoint, by every way in which experts may lie on the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.mixture import operands_of
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.mixture import ROOTS, MixtureValues, expert_placements
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array


def terms_of_ranks(site: Site) -> Iterator[Variant]:
    """The rank's own term alone; the sum without one rank's; what counts as often as there are ranks."""
    ranks = len(site.taps.ranks)
    if site.kind != ROOTS[1] or ranks == 1 or site.seen.shape != site.expected.shape:
        return
    values = MixtureValues(operands_of(site))
    shared = _of_shared(values)
    routed = site.expected - shared
    for how, terms in _terms(values, ranks).items():
        text = "no sum of the experts over the ranks: each of these ranks goes on with its own partial"
        if len(site.ranks) == 1:  # else all have the same
            yield Variant("experts_not_summed", "reduce", text, {"experts": how}, shared + terms[site.rank])
        for rank, term in terms.items():
            text = f"what rank {rank} gives of the experts is not in the sum over the ranks"
            fitted: dict[str, object] = {"experts": how, "rank": rank}
            yield Variant("experts_of_a_rank_missing", "reduce", text, fitted, site.expected - term)
    text = f"the sum of the experts over the ranks is made twice: their terms count {ranks} times"
    yield Variant("experts_summed_twice", "reduce", text, {"times": ranks}, shared + ranks * routed)
    text = f"the shared expert is added by each rank: it counts {ranks} times"
    yield Variant("shared_expert_on_every_rank", "reduce", text, {"times": ranks}, routed + ranks * shared)
    text = f"the sum over the ranks is made twice: all of it counts {ranks} times"
    yield Variant("mixture_summed_twice", "reduce", text, {"times": ranks}, ranks * site.expected)


def _of_shared(values: MixtureValues) -> Array:
    """What the sum has beside the routed experts."""
    ids, weights = (values.results[f"mlp.topk_{one}"][0] for one in ("ids", "weights"))
    inputs = {**values.operands.inputs, "mlp.topk_ids": ids, "mlp.topk_weights": np.zeros_like(weights)}
    return MixtureValues(replace(values.operands, inputs=inputs)).results[ROOTS[0]][0]


def _terms(values: MixtureValues, ranks: int) -> Mapping[str, Mapping[int, Array]]:
    """What each rank should give of the routed experts, by how they lie on the ranks."""
    ids, weights = (values.results[f"mlp.topk_{one}"][0] for one in ("ids", "weights"))
    inputs = {**values.operands.inputs, "mlp.topk_ids": ids, "mlp.topk_weights": weights}
    shared = _of_shared(values)
    found: dict[str, dict[int, Array]] = {}
    for rank in range(ranks):
        for groups, span, held in expert_placements(values.operands.facts.model, ranks, rank):
            how = "split" if groups == 1 else "placed" if groups == ranks else f"in {groups} groups"
            own = MixtureValues(replace(values.operands, inputs=inputs, span=span, held=held))
            found.setdefault(how, {})[rank] = own.results[ROOTS[0]][0] - shared
    return found
