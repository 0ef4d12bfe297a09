"""The words of the status lines: pure functions of what is known."""

from __future__ import annotations

from lockstep.sessions.state import STATE_WORDS
from lockstep.workbench.judgements.golden_event import GoldenEvent
from lockstep.workbench.tui.widgets.status_line import Fact
from lockstep.workbench.views.overview import Overview, Present
from lockstep.workbench.views.where import Where
from lockstep.workbench.words.numbers import chance, fixed, number
from lockstep.workbench.words.plain_text import plural

#: Dtypes as they fit on the line.
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

Facts = tuple[tuple[Fact, ...], tuple[Fact, ...]]


def status_facts(
    overview: Overview, where: Where, present: Present | None, state: Fact | None
) -> tuple[Facts, Facts]:
    """The status line and the line of faults below it."""
    last = present.steps.stop - 1 if present else 0
    speed = present.tokens_per_second if present else None
    position = present.position if present else None
    left = (
        Fact(overview.model, "strong"),
        Fact(f"tp {overview.ranks}", "text", drop=2),
        Fact(f"{overview.device} {_SHORT.get(overview.dtype, overview.dtype)}", "quiet", drop=6),
        Fact(f"step {where.step}/{last}", "accent", width=5 + 2 * len(str(last)) + 1),
        *([Fact(overview.batch.label(where.seq), "accent", drop=1)] if overview.batch.several else ()),
        Fact(f"pos {'-' if position is None else position}", "text", drop=4, width=8),
        Fact(f"{number(speed)} tok/s" if speed else "", "quiet", drop=7, width=11),
    )
    branch = overview.branch(where.branch)
    # In the first line too, which every size has.
    alarmed = present.alarm if present is not None else None
    short = (Fact(f"● {alarmed.name}", "alarm"),) if alarmed is not None else ()
    right = (*short, state or _recording(overview), Fact(f"branch {branch.name}", "text", drop=5))
    rules = ", ".join(f"{key}={value}" for key, value in branch.rules)
    rule_facts = (
        (Fact(f"faults  {rules}", "wrong"), Fact("← switched on", "quiet", drop=3))
        if rules
        else (Fact(f"recorded from {overview.engine}" if overview.engine else "faults  none", "quiet"),)
    )
    alarm = (Fact(f"● {alarmed.whole}", "alarm", brief=f"● {alarmed.where}"),) if alarmed is not None else ()
    return (left, right), (
        rule_facts,
        (*alarm, _golden(present, where.step), Fact(overview.name, "quiet", drop=2)),
    )


def _recording(overview: Overview) -> Fact:
    if overview.state == "incomplete":
        return Fact("incomplete", "wrong")
    return Fact("replay" if overview.state == "closed" else STATE_WORDS[overview.state], "quiet", drop=3)


def _golden(present: Present | None, step: int) -> Fact:
    if present is None or present.verdict is None:
        if present is not None and present.judgement is not None:
            return _of_other_steps(present.judgement, step)
        which = f"step {step} " if present is not None and present.steps else ""
        return Fact(f"golden: {which}not compared", "quiet", drop=1)
    if present.first_wrong is not None:
        return Fact(f"golden: ✗ {present.first_wrong}", "wrong", drop=1)
    if present.inconclusive:
        return Fact("golden: inconclusive", "wrong", drop=1)
    # Suspect taps lie above the rounding that was measured, but not by enough to call the step wrong.
    rest = "" if present.verdict == "pass" else f", some {present.verdict}"
    return Fact(f"golden: ✓ match{rest}", "text", drop=1)


def _of_other_steps(event: GoldenEvent, step: int) -> Fact:
    """What the comparison of other steps came to, where that of the present one is not known."""
    first = event.first_divergence
    if first is not None:
        return Fact(f"golden: ✗ step {first.step}, {first.tap}", "wrong", drop=1)
    if event.verdict == "match":
        return Fact(f"golden: ✓ {plural(event.steps, 'step')}, not step {step}", "quiet", drop=1)
    return Fact(f"golden: {event.verdict}", "wrong", drop=1)


def step_facts(present: Present | None) -> Facts:
    """What the present step did, when nothing more urgent is to be reported."""
    if present is None:
        return ((Fact("no steps yet", "quiet"),), ())
    if present.absent:
        return ((Fact(present.absent, "accent"),), ())
    if present.stopped_at:
        return ((Fact(f"under way: stopped at {present.stopped_at}", "accent"),), ())
    reported = f"{present.phase}" + (f" → {present.emitted}" if present.emitted is not None else "")
    figures = []
    if present.probability is not None:
        figures.append(f"p {chance(present.probability)}")
    if present.entropy is not None:
        figures.append(f"H {fixed(present.entropy, 2)}")
    return ((Fact(reported, "quiet"),), (Fact("  ".join(figures), "quiet", drop=1),))
