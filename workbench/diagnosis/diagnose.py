"""What is wrong in a recording, named from what was recorded and the checkpoint alone.

Each operation is judged on its own recorded inputs (`findings`), those that have one cause are drawn together
(`merging`), and what has no effect on the model accuses nobody (`effects`). No rule and no fault is read: an unknown
engine is diagnosed like our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lockstep.sessions.session import Session
from lockstep.workbench.diagnosis.causes import Extent, causes_of, taps_in_words
from lockstep.workbench.diagnosis.consequences import folded, misshapen_by_input
from lockstep.workbench.diagnosis.effects import Effect, harmless
from lockstep.workbench.diagnosis.findings import Found, Survey, WrongOperation, survey
from lockstep.workbench.diagnosis.greedy_choice import WrongChoices, wrong_choices
from lockstep.workbench.diagnosis.injection.reproduction import AT_LEAST, proved, reproduce
from lockstep.workbench.diagnosis.merging import FindingGroup, groups
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.site import Unjudged
from lockstep.workbench.diagnosis.operations.sites import sites
from lockstep.workbench.diagnosis.range_of_dtype import beyond_range
from lockstep.workbench.diagnosis.recording import Recording
from lockstep.workbench.diagnosis.rounding_order import rounding_orders
from lockstep.workbench.diagnosis.search_time import SEARCH_SECONDS, SearchTime
from lockstep.workbench.diagnosis.stream_order import ordered_stream
from lockstep.workbench.diagnosis.stream_reads import rescaled_reads
from lockstep.workbench.diagnosis.stream_scale import RestoredStream, scaled_stream
from lockstep.workbench.judgements.cause import Cause
from lockstep.workbench.judgements.reproduction import Reproduction


@dataclass(frozen=True, slots=True)
class Explanation:
    """The causes in the order in which they show, each followed by those that explain the same as well, and the
    findings behind them (`wrong`); what differs without an effect in words, and at which taps (`harmless`); how many
    operations were judged, and why others could not be. `overflown`: numbers have left the range of the dtype where
    those of the reference do. `untried`: the taps of which not all was tried, as the time for it was over or a
    bank failed; `ended`: why operations after that could not even be judged. `misshapen`: taps of findings that are of
    another shape because an input is. `choices`: greedy tokens that are not the likeliest, whose cause comes last.
    `otherwise`: of a recording in which nothing else is wrong, what explains it if errors that are gone in the rounding
    of what reads them have an effect after all."""

    causes: tuple[Cause, ...]
    notes: tuple[str, ...]
    wrong: tuple[WrongOperation, ...]
    harmless: tuple[str, ...]
    judged: int
    unjudged: tuple[Unjudged, ...]
    overflown: bool = False
    untried: tuple[str, ...] = ()
    ended: str = ""
    misshapen: frozenset[str] = frozenset()
    choices: WrongChoices | None = None
    otherwise: Callable[[], Explanation] | None = None


def diagnose(
    engine: Session,
    facts: Facts,
    *,
    golden: Session | None = None,
    floor: Session | None = None,
    branch: int = 0,
    seconds: float = SEARCH_SECONDS,
    reproducing: bool | None = False,
    report: Found = lambda finding: None,
) -> Explanation:
    """Explain the engine's `branch`. `facts` are of the checkpoint at the dtype that the engine declares; `golden`,
    where there is one, gives the positions of the tokens; `floor`, the reference at that dtype, what it cannot
    hold. `reproducing`: the causes are put into the reference; None: unless that takes longer than naming them did.
    `report` hears of each operation that differs when it is found: whether that has an effect is known at the end."""
    truth = None if golden is None else Recording(golden)
    taps = RecordedTaps(Recording(engine, branch), truth)
    time = SearchTime(seconds)
    seen = survey(sites(taps, facts), taps, time, report)
    restored = None if seen.ended else _restored(taps, facts, {finding.tap for finding in seen.findings})
    if restored is not None:
        taps = restored.taps
        seen = survey(sites(taps, facts), taps, time)
    found = groups(seen.findings)
    without = {} if seen.ended else harmless(found, taps, facts)
    noise = None if floor is None else Recording(floor)
    over = [] if noise is None or truth is None else list(beyond_range(found, noise, truth))
    examined = _Examined(taps, facts, seen, restored, found, over, noise, time, reproducing)
    explained = examined.explained(without)
    made_up = {number: effect for number, effect in without.items() if effect.by or not effect.taps}
    if not explained.wrong and len(made_up) < len(without):
        return replace(explained, otherwise=partial(examined.explained, made_up))
    return explained


@dataclass(frozen=True, slots=True)
class _Examined:
    """What was found in a recording, of which the groups `over` are out of the dtype's range; what it is explained
    with."""

    taps: RecordedTaps
    facts: Facts
    seen: Survey
    restored: RestoredStream | None
    found: list[FindingGroup]
    over: list[int]
    floor: Recording | None
    time: SearchTime
    reproducing: bool | None

    def explained(self, without: Mapping[int, Effect]) -> Explanation:
        """The explanation where the groups `without` have no effect."""
        seen, found, extent = self.seen, self.found, Extent.of(self.taps)
        wrong = [
            group for number, group in enumerate(found) if number not in without and number not in self.over
        ]
        harmless_taps = (
            *(() if self.restored is None else self.restored.right),
            *(tap for effect in without.values() for tap in effect.through),
            *(finding.tap for number in self.over for finding in found[number].findings),
        )
        choices = wrong_choices(self.taps.recording)
        reported = folded(wrong, seen.judged, extent.layers)
        reproduced = self._reproduced(reported, harmless_taps)
        return Explanation(
            (
                *(
                    cause
                    for group, after in reported
                    for cause in proved(causes_of(group, seen, extent, after), reproduced)
                ),
                *([] if choices is None else [choices.cause]),
            ),
            tuple(self._notes(without, extent)),
            tuple(finding for group in wrong for finding in group.findings),
            harmless_taps,
            sum(seen.judged.values()),
            seen.unjudged,
            bool(self.over),
            tuple(seen.untried),
            seen.ended,
            misshapen_by_input(wrong),
            choices,
        )

    def _reproduced(
        self, reported: Sequence[tuple[FindingGroup, Sequence[FindingGroup]]], harmless_taps: Sequence[str]
    ) -> Reproduction | None:
        """What the reference gives with the causes in it, where there are any and that is asked for."""
        if not reported or self.reproducing is False:
            return None
        left = self.time if self.reproducing else SearchTime(max(self.time.spent, AT_LEAST))
        put_in = [one for head, after in reported for one in (head, *(each for each in after if each.chosen))]
        return reproduce(put_in, self.taps, self.facts, left, harmless_taps)

    def _notes(self, without: Mapping[int, Effect], extent: Extent) -> Iterator[str]:
        if self.restored is not None:
            yield _note_of_stream(self.restored, extent)
        yield from (_note(self.found[number], effect, extent) for number, effect in without.items())
        for number in self.over:
            yield f"as the reference in {self.facts.dtype}: {_what(self.found[number], extent)}"
        yield from _notes_of_untried(self.seen, extent)
        if self.floor is not None and not self.seen.ended:
            yield from _notes_of_rounding(self.seen, self.taps, self.floor, self.facts, extent)


def _notes_of_untried(seen: Survey, extent: Extent) -> Iterator[str]:
    """What there was no time for or what failed, and what follows from that."""
    for why in dict.fromkeys(seen.untried.values()):
        at = taps_in_words([tap for tap, one in seen.untried.items() if one == why], extent.layers)
        yield f"not all hypotheses were tried at {at}: {why.removesuffix('.')}"
    if seen.ended:
        yield f"operations after these were not judged, nor whether they have an effect: {seen.ended}"


def _notes_of_rounding(
    seen: Survey, taps: RecordedTaps, floor: Recording, facts: Facts, extent: Extent
) -> Iterator[str]:
    """Where the engine rounds in another order than the reference at its dtype."""
    wrong = [finding.tap for finding in seen.findings]
    for one in rounding_orders(taps, RecordedTaps(floor), facts, wrong):
        yield one.in_words(extent.layers)


def _restored(taps: RecordedTaps, facts: Facts, wrong: set[str]) -> RestoredStream | None:
    """The recording with its residual stream as the checkpoint has it, where the engine keeps all of it in another
    form."""
    return (
        scaled_stream(taps, facts, wrong)
        or ordered_stream(taps, facts, wrong)
        or rescaled_reads(taps, facts, wrong)
    )


def _note_of_stream(restored: RestoredStream, extent: Extent) -> str:
    if not restored.right:
        return restored.text
    return f"differs, has no effect here: {taps_in_words(restored.right, extent.layers)}: {restored.text}"


def _note(group: FindingGroup, effect: Effect, extent: Extent) -> str:
    """What differs without an effect."""
    if effect.by:
        ends = f"{taps_in_words(effect.by, extent.layers)} makes up for it"
    elif effect.taps:
        ends = f"{taps_in_words(effect.taps[:1], extent.layers)} is the same with it"
    else:
        ends = "it makes up for another difference"
    return f"differs, has no effect here: {_what(group, extent)}; {ends}"


def _what(group: FindingGroup, extent: Extent) -> str:
    where = taps_in_words([one.tap for one in group.findings], extent.layers)
    what = group.chosen[group.findings.index(group.first)].text if group.chosen else group.first.example
    return f"{where}: {what}"
