"""A story in one sentence: what a reader must know if nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.workbench.views.story import Story
from lockstep.workbench.views.verdicts import Judged
from lockstep.workbench.words.numbers import number, times
from lockstep.workbench.words.plain_text import plural


@dataclass(frozen=True, slots=True)
class Headline:
    """The report in one sentence: `words`, a tap, where it was, and a line of more."""

    words: str
    tap: str = ""
    where: str = ""
    more: str = ""
    bad: bool = False


def headline(story: Story) -> Headline:
    """What a reader must know if nothing else."""
    judgement, first = story.judgement, story.judgement.first
    on = f" of branch {story.branch.name}" if len(story.branches) > 1 else ""
    fired = [one for one in story.sentinels if one.step is not None and one.branch == story.branch.id]
    if first is not None:
        ranks = "" if not first.ranks else f", rank {', '.join(map(str, first.ranks))}"
        return Headline(
            "Leaves the golden reference at",
            first.tap,
            f", step {first.step}{on}{ranks}",
            _how_wrong(first),
            True,
        )
    if judgement.unsupported:
        return Headline("Inconclusive.", more=f"{judgement.unsupported}.", bad=True)
    if judgement.steps:
        taps = sum(count for step in judgement.steps for state, count in step.counts if state != "absent")
        words = f"Agrees with the golden reference{on}"
        more = f"{plural(taps, 'tap')} judged at {plural(len(judgement.steps), 'step')}."
        return Headline(words + ".", more=more)
    if fired:
        one = min(fired, key=lambda hit: hit.step or 0)
        where = f" first at step {one.step}{on}: {one.what}"
        return Headline(
            f"{one.name[:1].upper()}{one.name[1:]}{where}.",
            more="Not judged against a golden reference.",
            bad=True,
        )
    return Headline("No sentinel fired.", more="Not judged against a golden reference.")


def _how_wrong(first: Judged) -> str:
    """The error in words; the reason where there is no number."""
    words = [] if first.rel_l2 is None else [f"relative L2 error {number(first.rel_l2)}"]
    if first.ratio is not None:
        words.append(f"{times(first.ratio)} times the noise floor")
    elif first.reason or not words:
        words.append(first.reason or "no number could be taken")
    return ", ".join(words)
