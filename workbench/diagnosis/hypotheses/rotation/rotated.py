"""One site's rotation as hypotheses read it: what went in, what came out, and the phases that were right.

rotated = convention(x, position * frequency) * factor
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph import operation_of
from lockstep.workbench.diagnosis.hypotheses.fits import Mask, wrong_heads, wrong_rows
from lockstep.workbench.diagnosis.hypotheses.rotation.conventions import RIGHT, Convention
from lockstep.workbench.diagnosis.hypotheses.rotation.phases import Phases
from lockstep.workbench.diagnosis.hypotheses.rotation.positions import PositionRule, TokenPlaces, rules
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.expected import heads_of, pairs_of, turned
from lockstep.workbench.diagnosis.operations.facts import UNIT
from lockstep.workbench.diagnosis.operations.rotary import Lengths, frequencies, lengths_of, magnitude
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Share of the error's norm that a prediction may leave to be worth reporting.
NEAR = 0.45
#: Tokens that a search looks at.
_TOKENS = 128
#: Positions beyond the last token's at which a token is looked for.
_BEYOND = 64


@dataclass(frozen=True)
class Rotated:
    """x, seen [N, heads, D]; positions and lengths [N]; frequencies [N or 1, 1, P]; `wrong` [N], `heads` [heads]. Of
    heads of which a part is rotated D are the channels of that part, first ones of all pairs before second ones:
    `whole` is all of x, `order` which of its channels they are; `model` has heads of these channels alone."""

    site: Site
    model: ModelConfig
    whole: Array
    order: NDArray[np.intp]
    x: Array
    seen: Array
    positions: Array
    lengths: Lengths
    frequencies: Array
    factor: float
    wrong: Mask
    heads: Mask

    @classmethod
    def of(cls, site: Site, *, unrotated: bool = False, finite: bool = True) -> Rotated | None:
        """None where shapes differ or nothing is wrong; if `finite`, also where wrong numbers are not finite; unless
        `unrotated`, also where the layer rotates nothing (NoPE)."""
        model = site.facts.model
        whole = heads_of(site.inputs["x"], model.head_dim)
        if not whole.shape == site.seen.shape == site.expected.shape:
            return None
        order = np.concatenate(pairs_of(model, np.arange(whole.shape[-1])))
        if not len(order) and not unrotated:
            return None
        x, seen = whole[..., order], site.seen[..., order]
        alone = replace(
            model, head_dim=model.rotary_dim, rotary=None, rotary_last=False, neighbours=False, latent=None
        )
        positions = np.array([row.position for row in site.rows], dtype=np.float64)
        lengths = lengths_of(site.rows)
        wrong = wrong_rows(site)
        if not wrong.any() or (finite and not np.isfinite(site.seen[wrong]).all()):
            return None
        return cls(site, alone, whole, order, x, seen, positions, lengths, frequencies(model, lengths),
                   magnitude(model), wrong, wrong_heads(site))  # fmt: skip

    @property
    def in_part(self) -> bool:
        """Whether channels have other places in a head than among those that are rotated."""
        return len(self.order) != self.whole.shape[-1] or bool((np.diff(self.order) != 1).any())

    def in_heads(self, part: Array) -> Array:
        """Rotated channels [N, heads, D] in their places, the others as they went in."""
        if not self.in_part:
            return part
        found = self.whole.astype(np.float64)
        found[..., self.order] = part
        return found

    @property
    def phase(self) -> Array:
        """The right phases [N, 1, P]."""
        return self.positions[:, None, None] * self.frequencies

    @property
    def factors(self) -> list[float]:
        """The attention factor, and none."""
        return [self.factor] if self.factor == 1 else [self.factor, 1.0]

    @cached_property
    def decode_only(self) -> bool:
        """Whether decode tokens are wrong, and those of the prompt, which turn as well, are right."""
        first = np.array([row.step for row in self.site.rows]) == min(row.step for row in self.site.rows)
        return bool(not (first & self.wrong).any() and (first & (self.positions > 0)).any())

    @cached_property
    def queries_turn(self) -> bool:
        """Whether the layer's queries are rotated right where these keys are wrong: the positions are known there."""
        model, site = self.site.facts.model, self.site
        declared = operation_of(model, "attn.q_rope")
        if declared is None or site.kind == declared.tap:
            return False
        x, seen = (site.rows_of(site.near(tap)) for tap in (declared.inputs["x"], declared.tap))
        if x is None or seen is None or x.size != seen.size or len(x) != len(self.wrong):
            return False
        x = heads_of(x, model.head_dim)
        right = turned(model, x, self.phase, self.factor)[self.wrong]
        off, moved = (np.linalg.norm(one.reshape(x.shape)[self.wrong] - right) for one in (seen, x))
        return bool(off < 0.1 * moved)

    @cached_property
    def places(self) -> TokenPlaces:
        windows = sorted({one for one in self.site.facts.model.windows if one is not None})
        return TokenPlaces.of(self.site.rows, windows)

    def wrong_part(self, tensor: Array) -> Array:
        """Of [N, heads, …] what is wrong."""
        return tensor[self.wrong][:, self.heads]

    @cached_property
    def sample(self) -> NDArray[np.intp]:
        """Of the wrong tokens those that a search looks at."""
        rows = np.flatnonzero(self.wrong)
        chosen = np.linspace(0, len(rows) - 1, min(len(rows), _TOKENS)).astype(int)
        return np.asarray(rows[chosen])

    @cached_property
    def noise(self) -> float:
        """Relative error that rounding may leave in one token."""
        part = self.site.parts[0]
        finite = np.isfinite(part.expected)
        sizes = [float(np.linalg.norm(x[finite])) for x in (part.noise, part.expected)]
        return 4 * sizes[0] / max(sizes[1], 1e-300)

    def of_head(self, moved: bool) -> Array | None:
        """What rounding leaves of a prediction whose elements are `moved` to other places; None: the usual."""
        if not moved:
            return None
        if not self.x.size:  # whole heads where none should be rotated: by the angles of the fastest pair
            size = np.sqrt(2) * np.abs(self.whole).max(-1, keepdims=True)
            loss = 4 * self.site.facts.unit + 4 * UNIT["float32"] * self.positions[:, None, None]
            return np.asarray(size * loss + np.zeros_like(self.whole))
        halves = np.hypot(*np.split(self.x, 2, axis=-1))
        neighbours = np.hypot(self.x[..., ::2], self.x[..., 1::2])
        largest = np.maximum(np.concatenate([halves, halves], -1), neighbours.repeat(2, axis=-1))
        unit = 4 * self.site.facts.unit * self.factor
        rounded = unit * (largest.max(-1, keepdims=True, initial=0.0) if self.in_part else largest)
        most = self.site.parts[0].noise.max(axis=-1, keepdims=True)
        return np.asarray(rounded + most + np.zeros_like(self.whole))

    # --- screening -------------------------------------------------------------------------------------

    def phases(self, convention: Convention, factor: float) -> Phases:
        """Of the sampled wrong tokens, their wrong heads together."""
        x, seen = (each[self.sample][:, self.heads] for each in (self.x, self.seen))
        return Phases.of(convention, x, seen, factor)

    @cached_property
    def right_errors(self) -> Array:
        """The squared errors [N, P] of the right rotation in the sample."""
        right = self.phases(RIGHT, self.factor)
        return right.error(self.sampled(self.phase))

    def sampled(self, phase: Array) -> Array:
        """Phases [N or 1, 1, P] of the sampled tokens, [N or 1, P]."""
        return phase[self.sample][:, 0] if len(phase) == len(self.wrong) else phase[:, 0]

    def share(self, phases: Phases, phase: Array) -> float:
        """The share of the error's norm that phases [N or 1, 1, P] leave in the sample."""
        left = float(phases.error(self.sampled(phase)).sum())
        return float(np.sqrt(left / max(float(self.right_errors.sum()), 1e-300)))

    # --- predictions -----------------------------------------------------------------------------------

    def turned(self, phase: Array, convention: Convention = RIGHT, factor: float | None = None) -> Array:
        return convention.rotate(self.x, phase) * (self.factor if factor is None else factor)

    def position_rules(self, phases: Phases, turns: Array | None = None) -> Iterator[PositionRule]:
        """The rules that the positions solved for at frequencies `turns` (the right ones by default) follow; those
        themselves, with no name, where they follow none."""
        turns = self.frequencies if turns is None else turns
        at, left = self.positions.copy(), np.zeros(len(self.positions))
        reach = float(self.positions.max()) * max(2.0, self.model.rope_scaling.factor) + _BEYOND
        rows = self.sample
        own = turns[rows, 0] if len(turns) == len(at) else turns[:, 0]
        at[rows], left[rows] = phases.positions(own, self.positions[rows], reach, self.noise)
        if left.max() > 0.2 + 4 * self.noise:
            return
        wrong = np.zeros(len(at), bool)
        wrong[rows] = at[rows] != self.positions[rows]
        if not wrong.any():
            return
        known = list(rules(self.places, at, wrong, 1e-3 + 8 * self.noise))
        kept = np.isin(np.arange(len(at)), rows) & ~wrong  # where something else than the position is wrong
        yield from (replace(rule, at=np.where(kept, self.positions, rule.at)) for rule in known)
        if not known and len(rows) == self.wrong.sum():
            yield PositionRule("", _shifts_text(self.positions[wrong], at[wrong]), at, {"positions": {
                str(int(p)): float(np.round(q, 3)) for p, q in zip(self.positions[wrong], at[wrong], strict=True)
            }})  # fmt: skip

    def variant(
        self, name: str, kind: str, text: str, fitted: Mapping[str, object], predicted: Array,
        parameters: int = 0, *, moved: bool = False,
    ) -> Variant:  # fmt: skip
        return Variant(
            name, kind, text, fitted, self.in_heads(predicted), parameters, noise=self.of_head(moved)
        )


def _shifts_text(right: Array, at: Array) -> str:
    reported = list(dict.fromkeys(f"{p:g} at {q:.4g}" for p, q in zip(right, at, strict=True)))
    words = ", ".join(reported[:4]) + (", …" if len(reported) > 4 else "")
    return f"tokens are rotated by wrong positions: {words}"
