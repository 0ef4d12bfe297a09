"""The norms of a model, each with its weight and its tap."""

from __future__ import annotations

from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.layers.weight import Store
from lockstep.engine.layers.wiring import Wiring


class Norm:
    """Normalises the last axis, whole on every rank: [..., D] -> [..., D]."""

    def __init__(self, module: str, size: int, model: ModelConfig, store: Store) -> None:
        self.name, self.weight = f"{module}.weight", store.vector(size)
        self.eps = model.rms_eps

    def parameters(self) -> dict[str, Tensor]:
        """Checkpoint name -> the weight."""
        return {self.name: self.weight}

    def bind(self, wiring: Wiring, tap: str) -> None:
        """Take the seam in force, and the tap if it is on."""
        self.rule, self.tap = wiring.rules.norm, wiring.tap(tap)

    def normalised(self, x: Tensor) -> Tensor:
        """Without the tap."""
        return self.rule(x, self.weight, self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        out = self.rule(x, self.weight, self.eps)
        if self.tap:
            self.tap(out)
        return out


def unnormed(x: Tensor) -> Tensor:
    """In place of a norm that the model has not."""
    return x
