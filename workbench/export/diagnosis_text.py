"""A diagnosis as text: every cause with its place, fit, confidence, evidence, fix, and public bugs of its kind."""

from __future__ import annotations

from rich.console import Console

from lockstep.sessions.text import clean
from lockstep.workbench.export.check_text import inconclusive, print_field, rests
from lockstep.workbench.judgements.cause import NO_CAUSE, cause_lines
from lockstep.workbench.judgements.golden_event import GoldenEvent


def render_diagnosis(event: GoldenEvent, console: Console) -> None:
    """Print all that was found."""
    rests(event, console)
    if event.first_divergence is not None:
        print_field(console, "first wrong", event.first_divergence.in_words(), "bold")
    for cause in event.causes:
        console.print()
        for label, words in cause_lines(cause):
            print_field(console, label, clean(words), "bold" if label in ("cause", "or") else "")
    if event.verdict == "diverged" and not event.causes:
        print_field(console, "cause", NO_CAUSE, "dim")
    if event.causes:
        console.print()
    if event.confirmed:
        print_field(
            console,
            "confirmed",
            f"with {', '.join(event.confirmed)} put right the run matches the reference",
        )
    for note in event.notes:
        print_field(console, "note", clean(note))
    style = {"match": "bold green", "inconclusive": "bold yellow"}.get(event.verdict, "bold red")
    why = f": {clean(inconclusive(event))}" if event.verdict == "inconclusive" else ""
    print_field(console, "verdict", event.verdict + why, style)
