"""The Golden pane in words and curves: the verdict, the error over depth, the ledger, a tap, a comparison that runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.workbench.tui.drivers.port import CommandStage
from lockstep.workbench.tui.widgets.plot import curve, squeeze
from lockstep.workbench.tui.widgets.text_block import TextLine
from lockstep.workbench.tui.widgets.verdict_map import MARKS
from lockstep.workbench.views.sequences import of_all
from lockstep.workbench.views.step_verdicts import GoldenTap, JudgedStep
from lockstep.workbench.views.verdicts import JUDGED_WORDS, Judged, State
from lockstep.workbench.words.numbers import number, power
from lockstep.workbench.words.plain_text import plural

#: The error at which the plot begins: what is below is no error worth a line.
_LEAST = 1e-9
#: Cells of a bar of progress.
_BAR = 12
#: Cells up to which what the parts are called moves all figures: one may quote a cause.
_WIDEST = 40


def progress_lines(stages: Sequence[CommandStage]) -> list[TextLine]:
    """A comparison that runs: each part with its passes and seconds, the one that is under way last."""
    head: TextLine = [
        ("comparing with the golden reference", "strong"),
        (f"   {sum(stage.seconds for stage in stages):.0f} s   ctrl+c interrupts", "quiet"),
    ]
    width = min(_WIDEST, max(len(stage.what) for stage in stages))
    return [head, [], *(_stage(stage, width, stage is stages[-1]) for stage in stages), []]


def _stage(stage: CommandStage, width: int, under_way: bool) -> TextLine:
    mark: tuple[str, str] = ("▶ ", "accent") if under_way else ("✓ ", "quiet")
    passes = f"{stage.done:>4} of {stage.of:<4}" if stage.of else " " * 12
    reported: TextLine = [
        mark,
        (f"{stage.what:<{width}} ", "text" if under_way else "quiet"),
        (f"{passes} {stage.seconds:>4.0f} s", "quiet"),
    ]
    if not under_way or not stage.of:
        return reported
    full = _BAR * stage.done // stage.of
    return [*reported, ("   " + "━" * full, "accent"), ("─" * (_BAR - full), "quiet")]


def verdict_lines(snapshot: JudgedStep, sequences: int, most: int = 3) -> list[TextLine]:
    """What the step comes to, its cause, and what else is to be known of the judgement: `most` of these notes, and how
    many there are more."""
    first = snapshot.first
    inherited = first is not None and first.judged.inherited  # of what an earlier step has left wrong
    reported = (
        (f"✗ first with wrong input: {first.name}" if inherited else f"✗ first wrong: {first.name}", "wrong")
        if first
        else ("? inconclusive", "wrong")
        if snapshot.inconclusive
        else ("✓ matches the golden reference", "strong")
    )
    rest = f"   {_counted([tap.judged.state for tap in snapshot.taps.values()])}"
    if whole := of_all(sequences):
        rest += f"   each the worst {whole}"
    causes: list[TextLine] = [[("cause  ", "quiet"), (cause, "strong")] for cause in snapshot.causes[:1]]
    causes += [[("proof  ", "quiet"), (snapshot.proof, "text")]] if snapshot.proof else []
    notes: list[TextLine] = [[("note   ", "quiet"), (note, "text")] for note in snapshot.notes[:most]]
    if (left := len(snapshot.notes) - most) > 0:
        notes.append([(f"       and {plural(left, 'more note')}: a taller window shows them", "quiet")])
    return [[reported, (rest, "quiet")], *causes, *notes]


def error_curve(snapshot: JudgedStep, height: int, width: int) -> list[TextLine]:
    """The error of each tap in order, on a logarithmic scale."""
    judged = [tap.judged for tap in snapshot.taps.values()]
    errors = squeeze([_level(_error(one)) for one in judged], max(20, width))
    floors = squeeze([_level(one.floor) for one in judged], max(20, width))
    known = [level for level in (*errors, *floors) if level is not None and math.isfinite(level)]
    labels = ["", *[""] * (height - 2), ""]
    if known:
        labels[0], labels[-1] = power(10 ** max(known)), power(10 ** min(known))
    drawn = curve(errors, floors, height)
    lines: list[TextLine] = [
        [(f"{label:>6} ", "quiet"), *line] for label, line in zip(labels, drawn, strict=True)
    ]
    head: TextLine = [("error of each tap", "quiet")]
    if any(floor is not None for floor in floors):
        head = [*head, ("   ⠂", "quiet"), (" noise floor", "quiet")]
    return [head, *lines]


def ledger_lines(snapshot: JudgedStep, room: int) -> list[TextLine]:
    """The operations that err on right inputs, as many as `room` lines have, and how many only inherited what was
    wrong."""
    failed = [tap for tap in snapshot.taps.values() if tap.judged.verdict == "fail"]
    own = [tap for tap in failed if not tap.judged.inherited]
    if not failed:
        return []
    many = "operation errs by itself" if len(own) == 1 else "operations err by themselves"
    head: TextLine = [(f"{len(own)} {many}", "wrong"), (f", {len(failed) - len(own)} inherited", "quiet")]
    listed = len(own) if len(own) <= room - 2 else max(1, room - 3)
    left: list[TextLine] = [[(f"  and {len(own) - listed} more", "quiet")]] if len(own) > listed else []
    return [[], head, *(_entry(tap) for tap in own[:listed]), *left]


def tap_lines(name: str, found: GoldenTap | None, wide: bool) -> list[TextLine]:
    """What the judge reported of a tap: a line a figure where it is `wide`, else all on one."""
    if found is None:
        return [[(name, "strong"), (f"   {JUDGED_WORDS['absent']}", "quiet")]]
    role = "wrong" if found.judged.verdict == "fail" else "text"
    head: TextLine = [(f"{name}   ", "strong"), (JUDGED_WORDS[found.judged.state], role)]
    if not wide:
        flat = [
            piece
            for words, value in found.details
            for piece in ((f"   {words} ", "quiet"), (shown(value), "text"))
        ]
        return [head, flat]
    # What is wrong without a number has a reason, which is what one wants to read where few lines are seen.
    pairs = sorted(found.details, key=lambda pair: pair[0] != "reason")
    return [head, *([(f"  {words:<24}", "quiet"), (shown(value), "text")] for words, value in pairs)]


def legend() -> TextLine:
    """What the marks of the map mean."""
    pairs = ((MARKS[state], words) for state, words in JUDGED_WORDS.items())
    return [piece for mark, words in pairs for piece in (mark, (f" {words}   ", "quiet"))]


def shown(value: float | str) -> str:
    """A figure of the judge, as text."""
    return number(value) if isinstance(value, float) else value


def _error(judged: Judged) -> float | None:
    """The figure of a tap; NaN where it is wrong in a way that has none."""
    return math.nan if judged.figure is None and judged.verdict == "fail" else judged.figure


def _level(figure: float | None) -> float | None:
    """On a logarithmic scale; what is not finite stays."""
    return figure if figure is None or not math.isfinite(figure) else math.log10(max(abs(figure), _LEAST))


def _counted(states: Sequence[State]) -> str:
    """How many there are of each."""
    reported = ((state, states.count(state)) for state in JUDGED_WORDS)
    return "  ".join(f"{number} {JUDGED_WORDS[state]}" for state, number in reported if number)


def _entry(tap: GoldenTap) -> TextLine:
    """A line of the ledger: the error on golden inputs where it is known, else the one of the run as it is."""
    judged = tap.judged
    figure = _error(judged) if judged.injected is None else judged.injected
    return [(f"  {tap.name:<28}", "text"), (number(figure), "wrong")]
