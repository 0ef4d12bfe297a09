"""Changes of attention's tree that are tried: on a few wrong queries, and whole where they leave little there.

Of several that give the same numbers the first is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.attention.tree import AttentionTree, Changes, Given
from lockstep.workbench.diagnosis.hypotheses.attention.words import wording
from lockstep.workbench.diagnosis.hypotheses.edits import Detail, Edit, EditKind
from lockstep.workbench.diagnosis.hypotheses.fits import GivenBefore
from lockstep.workbench.diagnosis.hypotheses.setting import Wording
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Share of the error that a hypothesis may leave in the sample to be made whole, and to be one of a pair.
NEAR, PARTLY = 0.5, 0.97


@dataclass(frozen=True, slots=True)
class Trial:
    """Edits with what they change, and the numbers that were solved for; `words` of what is no list's edit."""

    edits: tuple[Edit, ...]
    changes: Changes
    numbers: int = 0
    tolerance: float = 0.0
    grown: float = 1.0
    words: Wording | None = None


def one_edit(place: str, kind: EditKind, detail: Detail, changes: Changes, numbers: int = 0) -> Trial:
    return Trial((Edit(place, kind, detail),), changes, numbers)


def worded(words: Wording, changes: Changes, numbers: int = 0) -> Trial:
    """A change that brings its own words."""
    return Trial((), changes, numbers, words=words)


def judged(site: Site) -> bool:
    return site.deviation is not None and all(part.fits for part in site.parts)


def tried(
    tree: AttentionTree, trials: Iterable[Trial], partly: list[tuple[float, Trial]] | None = None
) -> Iterator[Variant]:
    """Variants of the trials that explain enough of the sample; in `partly` those that explain some of it."""
    given_before = GivenBefore()
    for trial in trials:
        if not trial.changes.keys() <= tree.points:
            continue
        found = tree.sampled(trial.changes, PARTLY)
        if found is None:
            continue
        outs, left = found
        if not left < PARTLY:
            continue
        if partly is not None:
            partly.append((left, trial))
        if left > NEAR:
            continue
        if given_before(outs):
            continue
        if (made := tree.whole(trial.changes, trial.grown)) is not None:
            unseen = "allowed" in trial.changes and any(_hides_all(trial.changes, one) for one in tree.sample)
            yield variant_of(tree.site, replace(trial, numbers=trial.numbers + unseen), *made)


def _hides_all(changes: Changes, one: Given) -> bool:
    """Whether some query sees no key, so that what it gives is taken from what came out."""
    allowed = changes["allowed"](one.allowed.astype(np.float64), one)
    return bool((one.allowed.any(-1) & ~allowed.any(-1)).any())


def variant_of(site: Site, trial: Trial, outs: list[Array], noises: list[Array]) -> Variant:
    words = trial.words or wording(site, trial.edits)
    return Variant(
        words.name, words.kind, words.text, words.fitted, outs, trial.numbers, trial.tolerance, noises
    )
