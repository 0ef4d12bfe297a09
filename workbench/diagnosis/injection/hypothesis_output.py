"""What an operation gives under a hypothesis, on the inputs of a run into which that is put.

The bank that had the hypothesis is asked again at the operation as that run has it: what it predicts there is of that
run's inputs, and the places are those at which the recording is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lockstep.engine.graph.operation import CHOICES
from lockstep.workbench.diagnosis.findings import Hypothesis, WrongOperation
from lockstep.workbench.diagnosis.hypotheses.products.words import PRODUCTS
from lockstep.workbench.diagnosis.hypotheses.rowwise import EDITED, known_edits
from lockstep.workbench.diagnosis.hypotheses.variant import Fit, Variant, preference
from lockstep.workbench.diagnosis.merging import FindingGroup, alike
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.layers import missing_layers
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.replaced import Outputs, expected_of
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.operations.sites import sites_of
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.search import Search
from lockstep.workbench.diagnosis.search_time import SearchTime

#: A tap, the operation that was judged there, and a rank.
Place = tuple[str, str, int]


class NotInjected(Exception):
    """A hypothesis that cannot be put into another run; the message states why."""


@dataclass(slots=True, eq=False)
class Injected:
    """What is put in, by place; and the recording as it is. `on_run_inputs`: the taps at which a hypothesis was not
    found again on the inputs of the run that it was put into, so that what it predicts of the recorded ones stands."""

    hypotheses: Mapping[Place, Hypothesis]
    taps: RecordedTaps
    facts: Facts
    time: SearchTime
    on_run_inputs: set[str] = field(default_factory=set, init=False)
    _known: list[Site] = field(
        default_factory=list, init=False
    )  # the last that was asked for as it was recorded

    @classmethod
    def of(
        cls, groups: Sequence[FindingGroup], taps: RecordedTaps, facts: Facts, time: SearchTime
    ) -> Injected:
        """The hypotheses that were chosen for the findings of groups."""
        chosen = {
            place: hypothesis
            for group in groups
            for finding, hypothesis in zip(group.findings, group.chosen, strict=False)
            for place in places_of(finding)
        }
        return cls(chosen, taps, facts, time)

    def __call__(self, site: Site) -> Outputs:
        """What the operation gives on the inputs of `site`. NotInjected; SearchEnded where there is no time."""
        hypothesis = self.hypotheses.get((site.tap, site.operation, site.rank))
        if hypothesis is None:
            return expected_of(site)
        recorded = self._recorded(site)
        if len(recorded.parts) != len(site.parts):
            raise NotInjected(f"{site.tap} is computed in other passes than it was recorded in")
        found = self._variant(_as_wrong_as(site, recorded), hypothesis)
        if found is None:  # what distinguishes it from others is too faint on other inputs than the run's
            found = self._variant(recorded, hypothesis)
            self.on_run_inputs.add(site.tap)
        if found is None:
            raise NotInjected(f"the hypothesis about {site.tap} was not found again")
        return _where_wrong(site, recorded, found)

    def _recorded(self, site: Site) -> Site:
        """The same operation on what was recorded."""
        if not self._known or (self._known[0].tap, self._known[0].operation) != (site.tap, site.operation):
            found = [
                *sites_of(site.tap, self.taps, self.facts),
                *missing_layers(site.tap, self.taps, self.facts),
            ]
            self._known = [one for one in found if isinstance(one, Site) and one.operation == site.operation]
        for one in self._known:
            if site.rank in one.ranks:
                return one
        raise NotInjected(f"{site.tap} cannot be judged by itself")

    def _variant(self, site: Site, hypothesis: Hypothesis) -> Variant | None:
        if site.deviation is None:
            return None
        if hypothesis.edits and site.operation in (*EDITED, *PRODUCTS):
            for variant in known_edits(site, [(site.layer, hypothesis.edits)]):
                if variant.edits == hypothesis.edits:
                    return variant
        search = Search(self.time, {site.kind: {hypothesis.name}})
        found = [one for one in search.fits(site)[0] if _same(one, hypothesis)]
        return min(found, key=preference).variant if found else None


def places_of(finding: WrongOperation) -> list[Place]:
    """Where it is, rank by rank."""
    return [(finding.tap, finding.operation, rank) for rank in finding.ranks]


def _same(found: Fit, hypothesis: Hypothesis) -> bool:
    variant = found.variant
    if variant.edits and variant.edits == hypothesis.edits:
        return True
    other = replace(
        hypothesis, name=variant.name, kind=variant.kind, fitted=variant.fitted, parameters=variant.parameters
    )
    return alike(other, hypothesis)


def _as_wrong_as(site: Site, recorded: Site) -> Site:
    """The site with the deviation of the recorded one, and granted what the run's roundings before it have moved."""
    parts = [_granted(*pair) for pair in zip(site.parts, recorded.parts, strict=True)]
    found = replace(site, parts=tuple(parts))
    vars(found)["deviation"] = recorded.deviation  # in place of what it would compute itself
    return found


def _granted(part: Part, recorded: Part) -> Part:
    if part.expected.shape != recorded.expected.shape:
        return part
    moved = part.expected - recorded.expected
    moved = moved[np.isfinite(moved)]
    inherited = float(np.sqrt((moved**2).mean())) if moved.size else 0.0
    return replace(part, noise=np.hypot(part.noise, inherited))


def _where_wrong(site: Site, recorded: Site, variant: Variant) -> list[Array]:
    """What was predicted where the recording is wrong, what is right elsewhere."""
    assert recorded.deviation is not None, "nothing is put where the recording is right"
    predicted = variant.predicted
    each = [predicted] if isinstance(predicted, np.ndarray) else list(predicted)
    return [
        np.where(scope, guess, part.expected) if guess.shape == scope.shape == part.expected.shape else guess
        for scope, guess, part in zip(recorded.deviation.scopes, each, site.parts, strict=True)
    ]


class Rounded:
    """Roundings of the run's dtype on top of what an operation gives: normally distributed, of the size that they may
    have. Whole numbers, as those of experts, have none."""

    def __init__(self, gives: Injected, seed: int = 0) -> None:
        self.gives, self.generator = gives, np.random.default_rng(seed)

    def __call__(self, site: Site) -> Outputs:
        given = self.gives(site)
        if site.operation in CHOICES:
            return given
        return [self._rounded(x, part) for x, part in zip(given, site.parts, strict=True)]

    def _rounded(self, x: Array, part: Part) -> Array:
        noise = np.where(np.isfinite(part.noise), part.noise, 0.0)
        if noise.shape != x.shape:
            noise = np.full(x.shape, float(np.median(noise)) if noise.size else 0.0)
        else:  # a result that is larger has larger roundings
            with np.errstate(all="ignore"):
                grown = np.abs(x) / np.abs(part.expected)
            noise = noise * np.where(np.isfinite(grown), np.clip(grown, 1.0, None), 1.0)
        return np.asarray(x + noise * self.generator.standard_normal(x.shape))
