"""What is wrong in a recording, named from what was recorded and the checkpoint alone.

Each operation is judged on its own recorded inputs (`findings`), those that have one cause are drawn together
(`merging`), and what has no effect on the model accuses nobody (`effects`). No rule and no fault is read: an unknown
engine is diagnosed like our own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.sessions.session import Session
from lockstep.workbench.diagnosis.causes import Extent, causes_of, taps_in_words
from lockstep.workbench.diagnosis.consequences import folded, misshapen_by_input
from lockstep.workbench.diagnosis.effects import Effect, harmless
from lockstep.workbench.diagnosis.findings import Survey, WrongOperation, survey
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


@dataclass(frozen=True, slots=True)
class Explanation:
    """The causes in the order in which they show, each followed by those that explain the same as well, and the
    findings behind them (`wrong`); what differs without an effect in words, and at which taps (`harmless`); how many
    operations were judged, and why others could not be. `overflown`: numbers have left the range of the dtype where
    those of the reference do. `untried`: the taps of which not all was tried, as the time for it was over or a
    bank failed; `ended`: why operations after that could not even be judged. `misshapen`: taps of findings that are of
    another shape because an input is. `choices`: greedy tokens that are not the likeliest, whose cause comes last."""

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


def diagnose(
    engine: Session,
    facts: Facts,
    *,
    golden: Session | None = None,
    floor: Session | None = None,
    branch: int = 0,
    seconds: float = SEARCH_SECONDS,
    reproducing: bool | None = False,
) -> Explanation:
    """Explain the engine's `branch`. `facts` are of the checkpoint at the dtype that the engine declares; `golden`,
    where there is one, gives the positions of the tokens; `floor`, the reference at that dtype, what it cannot
    hold. `reproducing`: the causes are put into the reference; None: unless that takes longer than naming them did."""
    truth = None if golden is None else Recording(golden)
    taps = RecordedTaps(Recording(engine, branch), truth)
    time = SearchTime(seconds)
    seen, extent = survey(sites(taps, facts), taps, time), Extent.of(taps)
    restored = None if seen.ended else _restored(taps, facts, {finding.tap for finding in seen.findings})
    if restored is not None:
        taps = restored.taps
        seen = survey(sites(taps, facts), taps, time)
    found = groups(seen.findings)
    without = {} if seen.ended else harmless(found, taps, facts)
    over = [] if floor is None or truth is None else list(beyond_range(found, Recording(floor), truth))
    wrong = [group for number, group in enumerate(found) if number not in without and number not in over]
    harmless_taps = (
        *(() if restored is None else restored.right),
        *(tap for effect in without.values() for tap in effect.through),
        *(finding.tap for number in over for finding in found[number].findings),
    )
    choices = wrong_choices(taps.recording)
    reproduced = None
    reported = folded(wrong, seen.judged, extent.layers)
    if wrong and reproducing is not False:
        left = time if reproducing else SearchTime(max(time.spent, AT_LEAST))
        put_in = [one for head, after in reported for one in (head, *(each for each in after if each.chosen))]
        reproduced = reproduce(put_in, taps, facts, left, harmless_taps)
    return Explanation(
        (
            *(
                cause
                for group, after in reported
                for cause in proved(causes_of(group, seen, extent, after), reproduced)
            ),
            *([] if choices is None else [choices.cause]),
        ),
        (
            *([] if restored is None else [_note_of_stream(restored, extent)]),
            *(_note(found[number], effect, extent) for number, effect in without.items()),
            *(f"as the reference in {facts.dtype}: {_what(found[number], extent)}" for number in over),
            *_notes_of_untried(seen, extent),
            *(
                []
                if floor is None or seen.ended
                else _notes_of_rounding(seen, taps, Recording(floor), facts, extent)
            ),
        ),
        tuple(finding for group in wrong for finding in group.findings),
        harmless_taps,
        sum(seen.judged.values()),
        seen.unjudged,
        bool(over),
        tuple(seen.untried),
        seen.ended,
        misshapen_by_input(wrong),
        choices,
    )


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
