"""A tensor times a number of the model."""

from __future__ import annotations

from torch import Tensor

from lockstep.engine.config.multipliers import Multipliers
from lockstep.engine.graph.multipliers import FACTORS
from lockstep.engine.layers.wiring import Wiring


class Multiplier:
    """x times the number of that tap; of a model without multipliers x itself."""

    def __init__(self, tap: str, multipliers: Multipliers | None) -> None:
        self.name, self.factor = tap, None if multipliers is None else getattr(multipliers, FACTORS[tap])

    def bind(self, wiring: Wiring) -> None:
        """Take the seam in force and the tap that is on."""
        self.rule, self.tap = wiring.rules.multiplied, wiring.tap(self.name)

    def __call__(self, x: Tensor) -> Tensor:
        if self.factor is None:
            return x
        x = self.rule(x, self.factor, self.name)
        if self.tap:
            self.tap(x)
        return x
