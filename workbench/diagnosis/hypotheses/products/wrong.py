"""A wrong result of two axes, and a wrong product, as maps of them are fitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import product
from lockstep.workbench.diagnosis.hypotheses.edits import Detail, Edit
from lockstep.workbench.diagnosis.hypotheses.products.matrices import Matrix, own_part
from lockstep.workbench.diagnosis.hypotheses.variant import PARTLY
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

Indices = NDArray[np.intp]
#: Columns by which a candidate is tried before all of it is computed.
SAMPLE = 12


def mapped(name: str, *detail: str | float, at: Detail = ()) -> Edit:
    """A map of the result: `detail` is what it is, `at` what is another at each place."""
    return Edit((), "map", (name, *detail), at=at)


@dataclass(frozen=True, slots=True, eq=False)
class Wrong:
    """A result [N, C] that is wrong in some rows and columns: `base` is what a factor takes hold of, `rest` what is
    added to it then (the bias)."""

    site: Site
    seen: Array
    right: Array
    base: Array
    rest: Array
    rows: Indices
    columns: Indices

    @classmethod
    def of(cls, site: Site) -> Wrong | None:
        """None where what came out is not finite, or no two axes of the right lengths."""
        part, deviation = site.parts[0], site.deviation
        if deviation is None or not part.fits or part.seen.ndim != 2:
            return None
        if not (np.isfinite(part.seen).all() and np.isfinite(part.expected).all()):
            return None
        bias = own_part(site, site.weights["bias"]) if "bias" in site.weights else None
        rest = np.zeros(part.seen.shape[1]) if bias is None else bias.astype(np.float64)
        scope = deviation.scopes[0]
        return Wrong(
            site, part.seen, part.expected, part.expected - rest, rest, np.flatnonzero(scope.any(1)),
            np.flatnonzero(scope.any(0)),
        )  # fmt: skip

    @property
    def inside(self) -> tuple[Indices, ...]:
        return np.ix_(self.rows, self.columns)

    @property
    def error(self) -> Array:
        """What came out less what should have, in the wrong rows and columns."""
        return (self.seen - self.right)[self.inside]

    @property
    def noise(self) -> Array:
        """The same of the rounding."""
        return self.site.parts[0].noise[self.inside]

    @property
    def whole_rows(self) -> bool:
        return bool(len(self.columns) == self.seen.shape[1])

    def put(self, found: Array) -> Array:
        """What is right, with `found` [rows, columns] where it is not."""
        predicted = self.right.copy()
        predicted[self.inside] = found
        return predicted


@dataclass(frozen=True, slots=True, eq=False)
class WrongProduct(Wrong):
    """Of inputs `x` [N, in] and the rank's `weight` [out, in]; none without in features."""

    x: Array
    weight: Matrix

    @classmethod
    def of(cls, site: Site) -> Self | None:
        wrong, weight = Wrong.of(site), own_part(site, site.weights["weight"])
        if wrong is None or weight is None or not site.inputs["x"].size:
            return None
        return cls(
            site, wrong.seen, wrong.right, wrong.base, wrong.rest, wrong.rows, wrong.columns, site.inputs["x"], weight
        )  # fmt: skip

    @property
    def wrong_x(self) -> Array:
        return self.x[self.rows]

    def sampled(self) -> Indices:
        """A few of the wrong columns."""
        some = np.linspace(0, len(self.columns) - 1, min(SAMPLE, len(self.columns))).astype(int)
        return np.asarray(self.columns[some])

    def explains(self, tried: Array, columns: Indices) -> bool:
        """Whether [N, columns] leaves less of the wrong rows' error there than there is."""
        at = np.ix_(self.rows, columns)
        error = np.linalg.norm(self.seen[at] - self.right[at])
        return bool(np.linalg.norm(tried[self.rows] - self.seen[at]) <= PARTLY * error)

    def replay(self, weight: Matrix | None = None, x: Array | None = None) -> Array | None:
        """The output with other operands; None where a sample of wrong columns shows that it explains nothing."""
        weight, x, some = (
            self.weight if weight is None else weight,
            self.x if x is None else x,
            self.sampled(),
        )
        tried = x @ weight[some].astype(np.float64).T + self.rest[some]
        return product(x, weight) + self.rest if self.explains(tried, some) else None
