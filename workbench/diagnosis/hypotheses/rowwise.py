"""Hypotheses about norm, residual sum and activation: edits of their formulas.

for variant in row_edits(site): ...      # a bank, as `variants.search` takes them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from lockstep.engine.graph.formula import FORMULAS, Node
from lockstep.workbench.diagnosis.hypotheses.edits import Edit, together
from lockstep.workbench.diagnosis.hypotheses.generate import Choices, edits_of
from lockstep.workbench.diagnosis.hypotheses.operands import norm_weights, recorded
from lockstep.workbench.diagnosis.hypotheses.search import pairs, single
from lockstep.workbench.diagnosis.hypotheses.solve import Solved
from lockstep.workbench.diagnosis.hypotheses.trial import Lazy, RowTrial
from lockstep.workbench.diagnosis.hypotheses.words import told
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.variants.fits import narrower
from lockstep.workbench.diagnosis.variants.variant import Variant

#: Epsilons that engines have built in.
KNOWN_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 1e-4, 1e-7, 1e-9, 1e-10)
#: Hypotheses that are told of a site.
_TOLD = 12
_MIXING = ("rows_before", "rows_after", "rows_mean_of_sequence", "rows_mean_of_step")


def row_edits(site: Site) -> Iterator[Variant]:
    """Every single edit that explains something of what was seen, the nearest first."""
    yield from _variants(site, single)


def row_edit_pairs(site: Site) -> Iterator[Variant]:
    """Two edits at once."""
    yield from _variants(site, pairs)


def _variants(site: Site, search: Callable[[RowTrial, Iterable[Edit]], list[Solved]]) -> Iterator[Variant]:
    found = trial_of(site)
    if found is None:
        return
    trial, choices = found
    for solved in search(trial, edits_of(trial.formula, choices))[:_TOLD]:
        yield _variant(site, trial, solved)


def _variant(site: Site, trial: RowTrial, solved: Solved) -> Variant:
    tree, words = together(solved.edits, trial.formula), told(site, solved.edits)
    return Variant(
        words.name, words.kind, words.text, words.fitted, trial.whole(tree), solved.cost, noise=trial.noise_of(tree),
        edits=solved.edits,
    )  # fmt: skip


def trial_of(site: Site) -> tuple[RowTrial, Choices] | None:
    """The operation with all that its formula may read; None where what came out has another shape."""
    shape = site.expected.shape
    if site.seen.shape != shape or any(x.size != site.expected.size for x in site.inputs.values()):
        return None
    formula: Node = FORMULAS[site.operation]  # type: ignore[index]
    others = recorded(site, shape)
    own = {role: partial(np.reshape, x, shape) for role, x in site.inputs.items()}
    operands = {
        role: [name for name, load in others.items() if not np.array_equal(load(), x.reshape(shape))]
        for role, x in site.inputs.items()
    }
    weights: dict[str, Callable[[], object]] = {}
    numbers: dict[str, tuple[float, ...]] = {}
    if site.operation == "norm":
        names = list(norm_weights(site.facts, site.weights["weight"], shape[-1]))
        weights = {name: partial(site.facts.vector, name) for name in names}
        weights["weight"] = partial(site.facts.vector, site.weights["weight"])
        weights["eps"] = lambda: site.facts.model.rms_eps
        operands["weight"] = names
        numbers["eps"] = KNOWN_EPS
    parts = sorted({2, len(site.taps.ranks)} - {1})
    choices = Choices(
        operands=operands,
        results=list(others),
        numbers=numbers,
        vectors=("weight",) if "weight" in site.weights else (),
        dtypes=tuple(narrower(site.facts.dtype)),
        parts=[one for one in parts if shape[-1] % one == 0],
        rows=_MIXING,
    )
    return RowTrial(site, formula, Lazy({**own, **others}), Lazy(weights)), choices
