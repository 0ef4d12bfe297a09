"""Of one side: what each operation gives beyond what the reference computes of that operation's own inputs, and what
comes of the run where an operation errs as the other side's does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.operation import CHOICES
from lockstep.engine.taps.flow import is_known
from lockstep.engine.taps.names import operation_at
from lockstep.sessions import layouts
from lockstep.workbench.diagnosis.flips import is_choice
from lockstep.workbench.diagnosis.injection.graph_run import GraphRun
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.layers import missing_layers
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.replaced import Outputs, with_outputs
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.operations.sites import sites_of
from lockstep.workbench.diagnosis.recording import Array

#: (sequence, position as recorded)
Place = tuple[int, int]
#: What is added to rows of a tap, or of choices what stands in their place.
RowChanges = Mapping[Place, Array]

#: Which of these there are the passes decide: what goes wrong there is seen in the contexts that are computed of them.
_OF_PASSES = ("cells", "cache", "cached_rows")


def comparable_taps(ours: RecordedTaps, theirs: RecordedTaps) -> list[str]:
    """The taps up to the last norm that both recorded and whose rows are of tokens, in the order of execution."""
    names = (tap.name for tap in ours.recording.session.taps)
    return [
        tap
        for tap in names
        if is_known(tap)
        and tap != "logits"
        and ours.captured(tap)
        and theirs.captured(tap)
        and (operation := operation_at(tap)) is not None
        and operation.form not in _OF_PASSES
    ]


class OwnErrors:
    """Of `taps` those of `names` alone are looked at. An operation that cannot be computed of them is left out."""

    def __init__(self, taps: RecordedTaps, facts: Facts, names: Sequence[str]) -> None:
        known = {tap.name for tap in taps.recording.session.taps}
        self.facts, self.taps = facts, taps.without(known - set(names))
        self._errors = {tap: errors for tap in names if (errors := self._of_ranks(tap))}

    @property
    def names(self) -> list[str]:
        """The taps whose operations can be computed, in the order of execution."""
        return list(self._errors)

    def _of_ranks(self, tap: str) -> dict[int, Outputs]:
        """By rank, part by part of its site."""
        found: dict[int, Outputs] = {}
        for site in self._sites(tap):
            found |= dict.fromkeys(site.ranks, _errors(site))
        return found if len(found) == len(self.taps.ranks) else {}

    def _sites(self, tap: str) -> list[Site]:
        with np.errstate(all="ignore"):
            found = [one for one in sites_of(tap, self.taps, self.facts) if isinstance(one, Site)]
            return found or list(missing_layers(tap, self.taps, self.facts))

    def rows(self, tap: str) -> dict[Place, Array]:
        """The errors whole, row by row; of a choice what was chosen."""
        if is_choice(tap):
            return self._rows(tap, self.taps)
        outputs = [(site, self._errors[tap][site.rank]) for site in self._sites(tap)]
        held = with_outputs(tap, self.taps, outputs)
        return {} if held is None else self._rows(tap, held)

    def _rows(self, tap: str, taps: RecordedTaps) -> dict[Place, Array]:
        found: dict[Place, Array] = {}
        for i, one in enumerate(taps.passes):
            whole = taps.whole(tap, [i])
            if whole is not None and len(whole) == len(one.rows):
                found |= {(one.seq, row.recorded_position): x for row, x in zip(one.rows, whole, strict=True)}
        return found

    def changed(self, changes: Mapping[str, RowChanges], last: str) -> dict[Place, Array]:
        """The rows of the tap `last` in a run whose operations err as they did, but those of `changes`, to whose
        outputs that is added; {} where that cannot be computed."""
        run = GraphRun(self.taps, self.facts, self._gives)
        begun = False
        for tap in self.names:
            begun = begun or tap in changes
            if begun:
                run.compute(tap)
            if tap in changes:
                run.taps = self._added(tap, run.taps, changes[tap])
            if tap == last:
                break
        return self._rows(last, run.taps)

    def _gives(self, site: Site) -> Outputs:
        errors = self._errors[site.tap][site.rank]
        if site.operation in CHOICES:
            return [
                np.where(ids < 0, part.expected, ids) for part, ids in zip(site.parts, errors, strict=True)
            ]
        return [part.expected + error for part, error in zip(site.parts, errors, strict=True)]

    def _added(self, tap: str, taps: RecordedTaps, change: RowChanges) -> RecordedTaps:
        layout, held = taps.recording.layout(tap), {rank: taps.tensors(tap, rank) for rank in taps.ranks}
        tensors: dict[int, list[Array | None]] = {rank: [] for rank in taps.ranks}
        for i, one in enumerate(taps.passes):
            parts = {rank: x for rank in taps.ranks if (x := held[rank][i]) is not None}
            if len(parts) == len(taps.ranks) and (whole := taps.whole(tap, [i])) is not None:
                places = [(one.seq, row.recorded_position) for row in one.rows]
                added = _placed(whole, places, change, instead=is_choice(tap))
                parts = _spread(layout, parts, added)
            for rank in taps.ranks:
                tensors[rank].append(parts.get(rank))
        return taps.replaced(tap, tensors)


def differences(
    ours: Mapping[Place, Array], theirs: Mapping[Place, Array], partners: Mapping[Place, Place], tap: str
) -> dict[Place, Array]:
    """What is to be added to rows of ours so that they err as their partners do, without those that do not differ; of a
    choice what they chose."""
    found = {}
    for place, mine in ours.items():
        other = theirs.get(partners[place]) if place in partners else None
        if other is None or other.shape != mine.shape:
            continue
        if is_choice(tap) and not _same_experts(mine, other):
            found[place] = other
        elif not is_choice(tap) and not np.array_equal(mine, other):
            found[place] = other - mine
    return found


def _placed(whole: Array, places: Sequence[Place], change: RowChanges, *, instead: bool) -> Array:
    """What is to be added to a pass's rows."""
    added = np.zeros_like(whole)
    for i, place in enumerate(places):
        if place in change and i < len(whole):
            added[i] = change[place] - whole[i] if instead else change[place]
    return added


def _spread(layout: layouts.Layout, parts: Mapping[int, Array], added: Array) -> dict[int, Array]:
    """Each rank's part with its share of what is added to the whole: of a sum, the first rank has it all."""
    if layout.kind == "partial":
        return {rank: x if rank else x + added for rank, x in parts.items()}
    sizes = None if layout.kind == "replicate" else layouts.sizes(layout, parts, len(parts))
    return {rank: parts[rank] + x for rank, x in layouts.cut(layout, added, len(parts), sizes).items()}


def _errors(site: Site) -> Outputs:
    """What was recorded less what it should be, 0 where that is no number; of a choice the experts of tokens that have
    others than their scores give, -1 of other tokens: it goes on following its scores."""
    if site.operation in CHOICES:
        return [np.where(_same_experts(part.seen, part.expected), -1.0, part.seen) for part in site.parts]
    with np.errstate(all="ignore"):
        found = (part.seen - part.expected for part in site.parts)
        return [np.where(np.isfinite(x), x, 0.0) for x in found]


def _same_experts(a: Array, b: Array) -> NDArray[np.bool_]:
    return np.asarray((np.sort(a, -1) == np.sort(b, -1)).all(-1, keepdims=True))
