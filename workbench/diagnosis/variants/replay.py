"""Replaying a product on its recorded inputs with something changed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import product
from lockstep.workbench.diagnosis.hypotheses.variant import PARTLY
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Columns by which a candidate is tried before all of it is computed.
SAMPLE = 12


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A product that is wrong, of one rank: x [N, in] times weight [out, in], plus bias [out] (zeros where none is).

    `rows` and `columns` are the wrong ones, by index.
    """

    site: Site
    x: Array
    weight: NDArray[np.floating]
    bias: Array
    has_bias: bool
    seen: Array
    expected: Array
    rows: NDArray[np.intp]
    columns: NDArray[np.intp]

    @classmethod
    def of(cls, site: Site) -> Linear | None:
        """None where what came out is not finite or of another shape."""
        deviation, part = site.deviation, site.parts[0]
        weight = own_part(site, site.weights["weight"])
        if deviation is None or not part.fits or weight is None or not np.isfinite(part.seen).all():
            return None
        x = site.inputs["x"]
        bias = own_part(site, site.weights["bias"]) if "bias" in site.weights else None
        scope = deviation.scopes[0]
        return cls(
            site, x, weight, np.zeros(len(weight)) if bias is None else bias.astype(np.float64), bias is not None,
            part.seen, part.expected, np.flatnonzero(scope.any(1)), np.flatnonzero(scope.any(0)),
        )  # fmt: skip

    @property
    def product(self) -> Array:
        """What should have come out but for the bias."""
        return self.expected - self.bias

    @property
    def error(self) -> Array:
        """What came out less what should have, in the wrong rows and columns."""
        return (self.seen - self.expected)[np.ix_(self.rows, self.columns)]

    def replay(
        self, weight: NDArray[np.floating] | None = None, bias: Array | None = None, x: Array | None = None
    ) -> Array | None:
        """The output with other operands; None where a sample of wrong columns says that it explains nothing."""
        weight = self.weight if weight is None else weight
        bias = self.bias if bias is None else bias
        x = self.x if x is None else x
        if weight.shape != self.weight.shape or x.shape != self.x.shape or bias.shape != self.bias.shape:
            return None
        some = self.columns[np.linspace(0, len(self.columns) - 1, min(SAMPLE, len(self.columns))).astype(int)]
        tried = x[self.rows] @ weight[some].astype(np.float64).T + bias[some]
        seen, right = self.seen[np.ix_(self.rows, some)], self.expected[np.ix_(self.rows, some)]
        if not np.linalg.norm(tried - seen) <= PARTLY * np.linalg.norm(seen - right):
            return None
        return product(x, weight) + bias


def own_part(site: Site, name: str) -> NDArray[np.floating] | None:
    """The part of a weight or bias of the checkpoint that the site's rank holds; None where it lacks or is smaller."""
    found = site.facts.weight(name)
    return None if found is None else cut(site, found)


def cut(site: Site, whole: NDArray[np.floating]) -> NDArray[np.floating] | None:
    """The part of a whole matrix or vector that the site's rank should hold."""
    if site.span is not None:
        if len(whole) < site.span.stop:
            return None
        whole = whole[site.span]
    if site.columns is not None and whole.ndim == 2:
        if whole.shape[1] < site.columns.stop:
            return None
        whole = whole[:, site.columns]
    return whole
