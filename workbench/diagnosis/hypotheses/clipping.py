"""Hypotheses about projections that are clamped, and about tensors times a number of the model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from lockstep.engine.graph.formula import numbers_of
from lockstep.workbench.diagnosis.hypotheses.edits import leaves
from lockstep.workbench.diagnosis.hypotheses.generate import Choices, edits_of
from lockstep.workbench.diagnosis.hypotheses.operands import formula_at
from lockstep.workbench.diagnosis.hypotheses.routing import formula_edits
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site


def clippings(site: Site) -> Iterator[Variant]:
    """Every single edit of the formula that explains something of what was seen."""
    tokens = {"x": lambda: np.reshape(site.inputs["x"], site.expected.shape)}
    others = {"clip": partial(float, numbers_of(site.facts.model)["clip"])}
    formula = formula_at(site)
    choices = Choices(numbers={"clip": ()}, orders=False)
    yield from formula_edits(site, formula, tokens, others, edits_of(formula, choices))


def multiplications(site: Site) -> Iterator[Variant]:
    """The same of a multiplier, which may be another one of the model's, and of the sum of two blocks."""
    tokens = {role: partial(np.reshape, x, site.expected.shape) for role, x in site.inputs.items()}
    formula = formula_at(site)
    own = {name: one for name, one in numbers_of(site.facts.model).items() if name.endswith("_multiplier")}
    names = [leaf for leaf in leaves(formula) if leaf in own]
    numbers = {name: sorted({one for other, one in own.items() if other != name}) for name in names}
    others = {name: partial(float, own[name]) for name in names}
    yield from formula_edits(
        site, formula, tokens, others, edits_of(formula, Choices(numbers=numbers, orders=False))
    )
