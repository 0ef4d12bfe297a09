"""Hypotheses about projections that are clamped."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from lockstep.engine.graph.formula import numbers_of
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
