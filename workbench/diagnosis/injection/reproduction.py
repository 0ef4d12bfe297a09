"""Causes put into the reference: whether that gives the run's tensors and tokens.

The graph is run three times, tap by tap: as it is, which has to give the reference's own logits; with the hypotheses
of all causes in their places; and so with roundings of the run's dtype on top, which shows how far rounding alone takes
such a run. What the recording is off the second run by is held against that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from lockstep.engine.taps.flow import is_known
from lockstep.sessions.limits import LimitExceeded
from lockstep.workbench import error_log
from lockstep.workbench.diagnosis.confidence import confidence_after
from lockstep.workbench.diagnosis.injection.graph_run import ComputedTap, GraphRun
from lockstep.workbench.diagnosis.injection.hypothesis_output import Injected, NotInjected, Rounded
from lockstep.workbench.diagnosis.merging import FindingGroup
from lockstep.workbench.diagnosis.operations.deviation import WRONG
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.search_time import SearchEnded, SearchTime
from lockstep.workbench.judgements.cause import Cause
from lockstep.workbench.judgements.reproduction import Outcome, Reproduction

#: What the graph may be off transformers in float64 by, relative: transformers has single steps in float32.
GRAPH_IS_REFERENCE = 1e-5
#: Seconds that it may always take.
AT_LEAST = 5.0
#: Share of the difference that may be left of it where a part of it is explained.
PARTLY = 0.5


@dataclass(slots=True)
class _Compared:
    """What the taps after the first change came to. Relative errors of the last that could be compared."""

    taps: int = 0
    within: int = 0
    end: str = ""
    before: float = math.nan
    after: float = math.nan
    floor: float = math.nan
    first_off: str = ""
    tokens: list[tuple[bool, bool]] = field(default_factory=list)  # before, after

    def add(self, plain: ComputedTap, changed: ComputedTap, rounded: ComputedTap) -> None:
        """One tap of the three runs."""
        size = changed.size or 1.0
        error, noise = changed.error(), changed.apart(rounded)
        self.taps, self.end = self.taps + 1, changed.tap
        self.before, self.after, self.floor = plain.error() / (plain.size or 1.0), error / size, noise / size
        if error == 0 or error <= WRONG * noise < math.inf:
            self.within += 1
        elif not self.first_off:
            self.first_off = changed.tap

    @property
    def outcome(self) -> Outcome:
        if self.within == self.taps and all(same for _, same in self.tokens):
            return "reproduced"
        return "partly" if self.after <= PARTLY * self.before else "not reproduced"


def reproduce(
    groups: Sequence[FindingGroup],
    taps: RecordedTaps,
    facts: Facts,
    time: SearchTime,
    harmless: Sequence[str] = (),
) -> Reproduction:
    """What comes of the reference with the hypotheses of all groups in it. `harmless`: taps that differ without an
    effect, which show nothing."""
    unnamed = next((group for group in groups if not group.chosen), None)
    if facts.model_free:
        return _not_tried("the model is not known")
    if unnamed is not None:
        return _not_tried(f"what is wrong at {unnamed.first.tap} is not explained")
    try:
        return _compared(Injected.of(groups, taps, facts, time), frozenset(harmless))
    except SearchEnded:
        return _not_tried(
            f"it takes longer than {time.seconds:.2g} s (`lockstep diagnose RUN.session --reproduce` takes the time)"
        )
    except (NotInjected, LimitExceeded) as error:
        return _not_tried(str(error))
    except Exception as error:  # a defect: the causes stand without their proof
        return _not_tried(error_log.survive(error))


def proved(causes: Sequence[Cause], found: Reproduction | None) -> Sequence[Cause]:
    """The cause of a group, and those that explain it as well, with what came of the first in the reference."""
    first, *rivals = causes
    if found is None:
        return causes
    sure = (
        None if first.confidence is None else confidence_after(first.confidence, found.outcome, len(rivals))
    )
    return [msgspec.structs.replace(first, reproduction=found, confidence=sure and round(sure, 4)), *rivals]


def _not_tried(why: str) -> Reproduction:
    return Reproduction("not tried", why=why)


def _compared(injected: Injected, harmless: frozenset[str]) -> Reproduction:
    taps, facts = injected.taps, injected.facts
    runs = (
        GraphRun(taps, facts.at("float64")),  # weights are not rounded there
        GraphRun(taps, facts, injected),
        GraphRun(taps, facts, Rounded(injected)),
    )
    places, found = {place[:2] for place in injected.hypotheses}, _Compared()
    names = (tap.name for tap in taps.recording.session.taps)
    begun, captured = False, [tap for tap in names if is_known(tap) and taps.captured(tap)]
    for tap in captured:
        injected.time.check()
        with np.errstate(all="ignore"):
            plain, changed, rounded = (run.compute(tap) for run in runs)
        begun = begun or any((site.tap, site.operation) in places for site in changed.sites)
        if tap == "logits":
            if (off := _off_reference(_logits(runs[0].taps), taps)) > GRAPH_IS_REFERENCE:
                return _not_tried(f"the graph alone is off the reference's logits by {off:.2g} (relative)")
            found.tokens = list(_tokens(runs[0], runs[1], taps))
        if begun and changed.outputs and rounded.outputs and tap not in harmless:
            found.add(plain, changed, rounded)
    if not begun:
        return _not_tried(
            "an operation between the tokens and it was not recorded, or cannot be computed again"
        )
    last = next((tap for tap in reversed(captured) if tap not in harmless), "")
    if found.end != last:
        return _not_tried(f"{last} cannot be computed from what goes before it")
    before, after = (sum(same) for same in zip(*found.tokens, strict=True)) if found.tokens else (0, 0)
    return Reproduction(
        found.outcome, "", found.end, found.before, found.after, found.floor, found.within, found.taps,
        found.first_off, after, before, len(found.tokens), taps.golden is not None,
        len(injected.on_run_inputs),
    )  # fmt: skip


def _off_reference(logits: Mapping[int, Array], taps: RecordedTaps) -> float:
    """By how much logits, by pass, are off the golden session's, relative; 0 without one."""
    worst = 0.0
    for i, ours in logits.items():
        one = taps.passes[i]
        golden = None if taps.golden is None else taps.golden.whole_or_none("logits", one.step, one.seq)
        theirs = None if golden is None else golden[-len(ours) :]
        if theirs is not None and theirs.shape == ours.shape:
            off, size = (float(np.linalg.norm(x)) for x in (ours - theirs, theirs))
            worst = max(worst, off / max(size, 1e-300))
    return worst


def _logits(taps: RecordedTaps) -> dict[int, Array]:
    """[rows, vocab] of each pass in which they are whole: of the last token, or of all."""
    found = ((i, taps.whole("logits", [i])) for i in range(len(taps.passes)))
    return {i: x for i, x in found if x is not None}


def _tokens(plain: GraphRun, changed: GraphRun, taps: RecordedTaps) -> Iterator[tuple[bool, bool]]:
    """Of each pass whether the likeliest token is the run's: without and with the change."""
    before, after = _logits(plain.taps), _logits(changed.taps)
    for i, seen in _logits(taps).items():
        if i in before and i in after:
            yield _same_token(before[i][-1], seen[-1]), _same_token(after[i][-1], seen[-1])


def _same_token(ours: Array, seen: Array) -> bool:
    """Of equals within the error either is the same."""
    if ours.shape != seen.shape or not np.isfinite(seen).any():
        return bool(np.array_equal(ours, seen, equal_nan=True))
    with np.errstate(all="ignore"):
        apart = np.abs(ours - seen)
    slack = float(np.median(apart[np.isfinite(apart)])) if np.isfinite(apart).any() else 0.0
    return bool(ours[int(np.nanargmax(seen))] >= np.nanmax(ours) - 2 * slack)
