"""The `:` line: the screen's own words, and how any line may be completed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.workbench.debugger.core.registry import Command
from lockstep.workbench.tui.screenshots import FORMATS
from lockstep.workbench.views.overview import Overview

#: First words that are the screen's, with what follows them; every other line is the debugger's.
OWN = {"pane": "a pane", "theme": "a theme", "quit": "", "help": "", "export": "a file, e.g. pane.svg"}
_ENDINGS = dict(FORMATS)
#: The most completions that are worth looking at.
_MOST = 50


class CommandProblem(ValueError):
    """A line that cannot be done: what is wrong, and what can be stated instead."""


@dataclass(frozen=True, slots=True)
class Act:
    """What one of the screen's own lines asks for."""

    do: str  # pane | export | split | theme | help | quit
    argument: str = ""
    number: int = 0


def parse_own(line: str, panes: Sequence[str]) -> Act | None:
    """What a line asks of the screen itself; None: it is the debugger's. CommandProblem states what is wrong."""
    word, _, rest = line.strip().lstrip(":").partition(" ")
    rest = rest.strip()
    if word == "pane":
        return Act("pane", rest, _pane(rest, panes))
    if word in ("q", "quit"):
        return Act("quit")
    if word == "help" and not rest:
        return Act("help")
    if word == "split":
        return Act("split", rest)
    if word == "theme":
        return Act("theme", rest)
    # `export script FILE` is the debugger's; a lone file name asks for the pane.
    if word == "export" and (not rest or (" " not in rest and Path(rest).suffix[1:] in _ENDINGS)):
        return Act("export", rest)
    return None


def complete(
    line: str, registry: Sequence[Command], overview: Overview | None, panes: Sequence[str]
) -> list[str]:
    """What the line may become: a command, then what its next argument may be."""
    *before, last = line.split(" ")
    if not before:
        known = sorted({*OWN, *(one.name for one in registry)})
        return [word for word in known if word.startswith(last)]
    if overview is None:
        return []
    choices = panes if before[0] == "pane" else _choices(before, registry, overview)
    start = " ".join(before)
    return [f"{start} {choice}" for choice in choices if choice.startswith(last)][:_MOST]


def _choices(before: Sequence[str], registry: Sequence[Command], overview: Overview) -> Sequence[str]:
    """What may stand after the words that are there already."""
    command = next((c for c in registry if before[0] == c.name or before[0] in c.aliases), None)
    arguments = [] if command is None else [a for a in command.arguments if a.kind != "flag"]
    at = len(before) - 1
    if command is None or not arguments or (at >= len(arguments) and arguments[-1].kind != "text"):
        return ()
    argument = arguments[min(at, len(arguments) - 1)]
    if argument.choices:
        return argument.choices
    from lockstep.engine.faults.catalogue import FAULTS  # here: the first paint waits for no fault

    if argument.kind == "fault":
        return tuple(dict.fromkeys(fault.seam for fault in FAULTS))
    if at and arguments[0].kind == "fault":
        return tuple(fault.value for fault in FAULTS if fault.seam == before[1])
    if argument.kind == "branch":
        return [branch.name for branch in overview.branches]
    return overview.taps if argument.kind in ("tap", "location", "text") else ()


def _pane(text: str, panes: Sequence[str]) -> int:
    for number, title in enumerate(panes, 1):
        if text == str(number) or (text and title.lower().startswith(text.lower())):
            return number
    raise CommandProblem(f"no pane {text!r}: there are {', '.join(panes)}")
