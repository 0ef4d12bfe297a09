"""How much error each tap may have: the reference's own, at the engine's dtype, against float64.

The noise of one tap at one step is a single draw, and where few numbers decide (a decode step's peaked
softmax) draws scatter widely: of 32 decode steps of a small model the median error of a context was 8e-7, the
largest 3e-6, and the engine's largest fell on a step at which the reference was lucky. The floor is therefore
the largest of

- the tap's own noise at this step,
- its noise at any decode step (or at the prefill) of any sequence,
- the noise of the same operation in the layers before and after, at this step,
- LEAST: a few roundings.

Where all draws are alike, as after a linear layer, that is hardly more than the tap's own noise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lockstep.engine.taps.names import layer_of, local_name
from lockstep.workbench.views.moved import ROUNDING

#: Noise that every tap is granted, as relative L2 error. In float32 a sum's order matters more than its
#: roundings: 4 eps. 16-bit engines add in float32 and round the result: half an eps.
LEAST = {
    "float64": 4 * 2.0**-52,
    "float32": 4 * 2.0**-23,
    "bfloat16": 0.5 * 2.0**-7,
    "float16": 0.5 * 2.0**-10,
}

#: (step, sequence, tap)
Place = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Floors:
    """The floor of every tap. `noise` is empty where floors are fixed."""

    dtype: str
    noise: Mapping[Place, float]
    _steps: Mapping[tuple[bool, str], float]

    @classmethod
    def measured(cls, dtype: str, noise: Mapping[Place, float]) -> Floors:
        """From the reference's relative L2 errors at `dtype`, by place; where there are none the labelled fallback."""
        over_steps: dict[tuple[bool, str], list[float]] = defaultdict(list)
        for (step, _, tap), error in noise.items():
            if math.isfinite(error):
                over_steps[step > 0, tap].append(error)
        return cls(dtype, noise, {key: max(errors) for key, errors in over_steps.items()})

    @property
    def tolerance(self) -> Literal["floor", "fixed"]:
        """How these floors came about."""
        return "floor" if self.noise else "fixed"

    def of(self, step: int, seq: int, tap: str) -> float:
        """The relative L2 error that is noise at this place."""
        if not self.noise:
            return ROUNDING[self.dtype]  # one floor for all taps: coarse, and labelled so
        own = self.noise.get((step, seq, tap), 0.0)
        around = [self.noise.get((step, seq, name), 0.0) for name in _neighbours(tap)]
        near = max((error for error in around if math.isfinite(error)), default=0.0)
        return max(own, self._steps.get((step > 0, tap), 0.0), near, LEAST[self.dtype])


def _neighbours(tap: str) -> list[str]:
    layer, kind = layer_of(tap), local_name(tap)
    return [] if layer is None else [f"layers.{i}.{kind}" for i in (layer - 1, layer + 1)]
