"""All causes of a divergence from the golden reference.

Operations are judged on their own recorded inputs. Where those of the first divergence were not recorded, the
reference's stand in for them: nothing before it is wrong, so that they differ by no more than noise, which is granted.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from lockstep.sessions import Session
from lockstep.workbench.diagnosis.causes import Extent, causes_of
from lockstep.workbench.diagnosis.diagnose import Explanation
from lockstep.workbench.diagnosis.findings import survey
from lockstep.workbench.diagnosis.merging import groups
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.replaced import completed
from lockstep.workbench.diagnosis.operations.site import Site, Unjudged
from lockstep.workbench.diagnosis.operations.sites import sites_of
from lockstep.workbench.diagnosis.operations.sources import sources_of
from lockstep.workbench.diagnosis.recording import Array, Recording
from lockstep.workbench.judgements.cause import NO_CAUSE, UNNAMED, Cause
from lockstep.workbench.judgements.golden_event import Divergence
from lockstep.workbench.views.moved import ROUNDING

_STAND_IN = "its own inputs were not recorded: the reference's stand in for them"


def named(
    found: Explanation,
    engine: Session,
    golden: Session,
    first: Divergence | None,
    facts: Facts,
    branch: int = 0,
) -> list[Cause]:
    """The causes in the order in which they show. `first` is where the run leaves the golden reference: that much is
    reported where nothing is named."""
    if first is None:
        return list(found.causes)
    lent: list[Cause] = []
    if first.tap in {one.tap for one in found.unjudged}:
        taps = RecordedTaps(Recording(engine, branch), Recording(golden))
        lent = _on_golden_inputs(first.tap, taps, facts)
    return [*lent, *found.causes] or [_unexplained(first, found)]


def _unexplained(first: Divergence, found: Explanation) -> Cause:
    """Where the run leaves the reference, and why nothing more is known."""
    reason = next((one.reason for one in found.unjudged if one.tap == first.tap), "")
    why = f"it could not be judged by itself, as {reason}" if reason else "it is right on its own inputs"
    return Cause(
        name="unnamed",
        text=f"differs from the reference ({first.reason}), and {NO_CAUSE}: {why}",
        kind=UNNAMED,
        tap=first.tap,
        place=first.tap,
        layers=() if first.layer is None else (first.layer,),
        ranks=first.ranks,
        steps=(first.step,),
    )


def _on_golden_inputs(tap: str, taps: RecordedTaps, facts: Facts) -> list[Cause]:
    """What explains one operation, given the reference's tensors for those that it lacks."""
    _, sources, _ = sources_of(tap, taps, facts)
    lent = taps
    for name in {name for source in sources.values() for name in source.taps}:
        lent = completed(name, lent, facts.dtype)
    seen = survey(map(_tolerant, sites_of(tap, lent, facts)), taps)
    causes = [cause for group in groups(seen.findings) for cause in causes_of(group, seen, Extent.of(taps))]
    return [
        msgspec.structs.replace(cause, evidence=(_STAND_IN, *cause.evidence))
        for cause in causes
        if cause.kind != UNNAMED
    ]


def _tolerant(site: Site | Unjudged) -> Site | Unjudged:
    """The site with the noise of inputs that are not its own."""
    if isinstance(site, Unjudged):
        return site
    slack = ROUNDING[site.facts.dtype]
    return replace(
        site, parts=tuple(replace(part, noise=part.noise + slack * _size(part)) for part in site.parts)
    )


def _size(part: Part) -> Array:
    """Of each row: the root mean square of what was expected."""
    finite = np.where(np.isfinite(part.expected), part.expected, 0.0)
    return np.asarray(np.sqrt((finite**2).mean(-1, keepdims=True)))
