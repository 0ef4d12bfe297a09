"""Experts in one kernel whose weights multiply what goes into them where they should multiply what comes out, or the
reverse: families differ in that, and kernels are written for one of both."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace

from lockstep.workbench.diagnosis.hypotheses.mixture import operands_of
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.mixture import ROOTS, MixtureValues
from lockstep.workbench.diagnosis.operations.site import Site

_TEXTS = {
    True: "an expert's weight multiplies what it gives, not what goes into it",
    False: "an expert's weight multiplies what goes into it, not what it gives",
}


def weighed_elsewhere(site: Site) -> Iterator[Variant]:
    """The mixture of the same model with its weights at the other end of the experts."""
    experts = site.facts.model.experts
    if experts is None or site.deviation is None or site.seen.shape != site.expected.shape:
        return
    operands = replace(operands_of(site), facts=_turned(site.facts))
    found = MixtureValues(operands).results[ROOTS[0]][0]
    fitted: dict[str, object] = {"weighed_inputs": not experts.weighed_inputs}
    yield Variant("experts_weighed_elsewhere", "weight", _TEXTS[experts.weighed_inputs], fitted, found)


def _turned(facts: Facts) -> Facts:
    found, experts = copy(facts), facts.model.experts
    assert experts is not None, "there are experts"
    found.model = replace(facts.model, experts=replace(experts, weighed_inputs=not experts.weighed_inputs))
    return found
