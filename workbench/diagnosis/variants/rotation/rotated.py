"""One site's rotation as its variants read it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lockstep.workbench.diagnosis.operations.expected import heads_of
from lockstep.workbench.diagnosis.operations.rotary import Lengths, frequencies, lengths_of, magnitude
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.fits import Mask, apart, wrong_heads, wrong_rows
from lockstep.workbench.diagnosis.variants.rotation.angles import Turns
from lockstep.workbench.diagnosis.variants.rotation.positions import FittedPositions, fit_positions

#: Positions beyond the last token's at which a token is looked for.
_BEYOND = 64


@dataclass(frozen=True)
class Rotated:
    """One site's rotation. x, seen [N, heads, D]; positions and lengths [N]; frequencies [N or 1, 1, P]; `wrong` [N],
    `heads` [heads]."""

    site: Site
    x: Array
    seen: Array
    positions: Array
    lengths: Lengths
    frequencies: Array
    factor: float
    wrong: Mask
    heads: Mask

    @classmethod
    def of(cls, site: Site) -> Rotated | None:
        model = site.facts.model
        x = heads_of(site.inputs["x"], model.head_dim)
        if not x.shape == site.seen.shape == site.expected.shape or not np.isfinite(site.seen).all():
            return None
        positions = np.array([row.position for row in site.rows], dtype=np.float64)
        lengths = lengths_of(site.rows)
        return cls(site, x, site.seen, positions, lengths, frequencies(model, lengths), magnitude(model),
                   wrong_rows(site), wrong_heads(site))  # fmt: skip

    @property
    def right(self) -> Array:
        """The right angles [N, 1, P]."""
        return self.positions[:, None, None] * self.frequencies

    @property
    def factors(self) -> list[float]:
        """The attention factor, and none."""
        return [self.factor] if self.factor == 1 else [self.factor, 1.0]

    def wrong_part(self, tensor: Array) -> Array:
        """Of [N, heads, …] what is wrong."""
        return tensor[self.wrong][:, self.heads]

    def near(self, predicted: Array, share: float = 0.3) -> bool:
        """Whether a prediction explains enough of the error to be worth telling."""
        error = apart(self.wrong_part(self.seen), self.wrong_part(self.site.expected))
        return apart(self.wrong_part(self.seen), self.wrong_part(predicted)) <= share * error

    @cached_property
    def noise(self) -> float:
        """Relative error that rounding may leave in one token."""
        part = self.site.parts[0]
        return 4 * float(np.linalg.norm(part.noise) / max(float(np.linalg.norm(part.expected)), 1e-300))

    @cached_property
    def fitted(self) -> FittedPositions:
        """The positions at which the wrong tokens were rotated; the others at their own."""
        at, left = self.positions.copy(), np.zeros(len(self.positions))
        scaling = self.site.facts.model.rope_scaling
        reach = float(self.positions.max()) * max(2.0, scaling.factor) + _BEYOND
        own = self.frequencies
        turns = own[self.wrong] if len(own) == len(self.wrong) else own
        found = fit_positions(self.wrong_part(self.x), self.wrong_part(self.seen), turns,
                              self.positions[self.wrong], reach, self.noise)  # fmt: skip
        at[self.wrong], left[self.wrong] = found.at, found.left
        return FittedPositions(at, left)

    @cached_property
    def turns(self) -> Turns:
        return Turns.of(
            self.wrong_part(self.x),
            self.wrong_part(self.seen),
            self.positions[self.wrong],
            self.lengths[self.wrong],
        )
