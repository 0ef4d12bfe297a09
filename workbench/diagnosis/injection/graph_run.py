"""The reference run operation by operation: the graph in float64, on what its own operations gave before.

`operations.sites` computes what each operation should give on recorded inputs. Here it is given what the operations
before it gave, so that the recording gives nothing but which taps, ranks, passes and tokens there are, and how ties
between experts fell. Without anything put into it, it gives what transformers gives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.engine.taps.names import layer_of, operation_at
from lockstep.workbench.diagnosis.operations.deviation import distance
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.layers import missing_layers
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.replaced import Outputs, completed, expected_of, with_outputs
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.operations.sites import sites_of
from lockstep.workbench.diagnosis.recording import Array

#: What an operation gives on the run's inputs, part by part.
Gives = Callable[[Site], Outputs]


@dataclass(frozen=True, slots=True, eq=False)
class ComputedTap:
    """What a run gave at one tap, `outputs` of each site part by part; none where it could not be computed."""

    tap: str
    sites: tuple[Site, ...]
    outputs: tuple[Outputs, ...]

    @property
    def size(self) -> float:
        """The norm of what is finite."""
        return math.hypot(*(_norm(np.where(np.isfinite(x), x, 0.0)) for one in self.outputs for x in one))

    def error(self) -> float:
        """The norm of what was recorded less what this run gave; infinite where one is not finite, or of another
        shape."""
        pairs = [
            (part.seen, x, part.largest)
            for site, given in zip(self.sites, self.outputs, strict=True)
            for part, x in zip(site.parts, given, strict=True)
        ]
        return _apart(pairs)

    def apart(self, other: ComputedTap) -> float:
        """The norm of the difference of two runs."""
        pairs = [
            (a, b, part.largest)
            for site, ours, theirs in zip(self.sites, self.outputs, other.outputs, strict=True)
            for part, a, b in zip(site.parts, ours, theirs, strict=True)
        ]
        return _apart(pairs)


class GraphRun:
    """Computes one tap after the other; `gives` is asked at every operation what it gives there."""

    def __init__(self, taps: RecordedTaps, facts: Facts, gives: Gives = expected_of) -> None:
        self.taps, self.facts, self.gives = taps, facts, gives
        self._begun = False  # whether anything was computed: what goes in before that may be the reference's
        self._held: dict[int, list[str]] = {}  # taps that nothing but the next layer reads, by layer

    def compute(self, tap: str) -> ComputedTap:
        """The next tap in the order of execution."""
        self._forget(tap)
        sites = _sites(tap, self.taps, self.facts)
        if not sites and not self._begun:
            self.taps = _lent(tap, self.taps)
            return ComputedTap(tap, (), ())
        recorded, rounds = sites, self._rounds(sites)
        for number in range(rounds):
            outputs = [(site, _as_listed(site, self.gives(site))) for site in sites]
            replaced = with_outputs(tap, self.taps, outputs)
            if replaced is not None and number + 1 < rounds:  # the next pass reads what this one has left
                sites = _as_seen(_sites(tap, replaced, self.facts), recorded)
        lacking: dict[int, Sequence[Array | None]] = dict.fromkeys(
            self.taps.ranks, (None,) * len(self.taps.passes)
        )
        self.taps = self.taps.replaced(tap, lacking) if replaced is None else replaced
        if replaced is None:
            return ComputedTap(tap, (), ())
        self._begun = True
        return ComputedTap(tap, tuple(sites), tuple(given for _, given in outputs))

    def _rounds(self, sites: Sequence[Site]) -> int:
        """How often an operation is computed: one that reads what it gave in the pass before, once for each pass of a
        sequence."""
        if not any(site.operation in ("state", "ssm_state") for site in sites):
            return 1
        return max(Counter(one.seq for one in self.taps.passes).values())

    def _forget(self, tap: str) -> None:
        """Of layers before the last one keeps what the stream is the sum of: no operation reads more of them."""
        operation, layer = operation_at(tap), layer_of(tap)
        if operation is None or layer is None or (operation.width == "hidden" and not operation.summed):
            return
        self._held.setdefault(layer, []).append(tap)
        for old in [one for one in self._held if one < layer - 1]:
            self.taps = self.taps.forgetting(self._held.pop(old))


def _sites(tap: str, taps: RecordedTaps, facts: Facts) -> list[Site]:
    """The operation on all ranks that it can be computed on."""
    found = [one for one in sites_of(tap, taps, facts) if isinstance(one, Site)]
    return found or list(missing_layers(tap, taps, facts))


def _as_seen(sites: Sequence[Site], recorded: Sequence[Site]) -> list[Site]:
    """The sites with what was recorded, in place of what was computed before."""
    by_rank = {rank: one for one in recorded for rank in one.ranks}
    return [
        replace(
            site,
            parts=tuple(
                replace(part, seen=other.seen)
                for part, other in zip(site.parts, by_rank[site.rank].parts, strict=True)
            ),
        )
        for site in sites
    ]


def _as_listed(site: Site, outputs: Outputs) -> Outputs:
    """Of experts: in the order in which the run lists those of a token, where they are the same ones; the site has them
    by their numbers."""
    listed = site.taps.rows(site.tap, site.rank, site.passes) if site.operation == "choice" else None
    if listed is None or listed.shape != outputs[0].shape:
        return outputs
    same = (np.sort(listed, -1) == np.sort(outputs[0], -1)).all(-1, keepdims=True)
    return [np.where(same, listed, outputs[0])]


def _lent(tap: str, taps: RecordedTaps) -> RecordedTaps:
    """With what the reference gave at a tap, in place of what was recorded."""
    nothing: Sequence[Array | None] = (None,) * len(taps.passes)
    return completed(tap, taps.replaced(tap, dict.fromkeys(taps.ranks, nothing)), "float64")


def _apart(pairs: Sequence[tuple[Array, Array, float]]) -> float:
    if any(a.shape != b.shape for a, b, _ in pairs):
        return math.inf
    return math.hypot(*(_norm(distance(a, b, largest)) for a, b, largest in pairs))


def _norm(x: Array) -> float:
    with np.errstate(over="ignore"):
        return float(np.linalg.norm(x)) if np.isfinite(x).all() else math.inf
