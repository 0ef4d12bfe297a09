"""The `:` line without an engine: what a replay can do, in the debugger's words. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from workbench.tui.snapshots.overview import Overview, Where


class CommandProblem(ValueError):
    """A line that cannot be done: what is wrong, and what can be said instead."""


@dataclass(frozen=True, slots=True)
class Act:
    """What a line asks for: an action of the screen with its argument."""

    do: str  # goto | move | tap | tensor | branch | pane | export | theme | quit
    argument: object = None
    times: int = 1


_MOVES = {
    "next": ("token", 1), "reverse-next": ("token", -1), "step": ("layer", 1), "reverse-step": ("layer", -1),
    "stepi": ("operation", 1), "nexti": ("operation", 1), "reverse-stepi": ("operation", -1),
    "continue": ("stop", 1), "reverse-continue": ("stop", -1), "finish": ("finish", 1),
}  # fmt: skip
_ALIASES = {
    "n": "next", "s": "step", "si": "stepi", "ni": "nexti", "c": "continue", "f": "finish", "rn": "reverse-next",
    "rs": "reverse-step", "rc": "reverse-continue", "p": "print", "q": "quit",
}  # fmt: skip
#: First words that this line knows, with what follows them.
WORDS = (*_MOVES, "goto", "print", "break-at", "branch", "pane", "export", "theme", "help", "quit")
ENGINE_ONLY = (
    "run",
    "break",
    "tbreak",
    "watch",
    "catch",
    "toggle",
    "patch",
    "set",
    "golden",
    "checkpoint",
    "restart",
)


def parse(line: str, overview: Overview, where: Where, panes: Sequence[str]) -> Act:
    """What a line means here. CommandProblem says what to type instead."""
    word, _, rest = line.strip().lstrip(":").partition(" ")
    word, rest = _ALIASES.get(word, word), rest.strip()
    if word in _MOVES:
        kind, by = _MOVES[word]
        return Act("move", (kind, by), _whole(rest, f"{word} [COUNT]") if rest else 1)
    if word == "goto":
        return Act("goto", _whole(rest, "goto STEP"))
    if word in ("print", "x"):
        return Act("tensor", _tap(rest, overview))
    if word in ("frame", "tap", "until"):
        return Act("tap", _tap(rest, overview))
    if word == "branch":
        return Act("branch", _branch(rest, overview))
    if word == "pane":
        return Act("pane", _pane(rest, panes))
    if word in ("export", "theme", "help", "quit"):
        return Act(word, rest)
    if word in ENGINE_ONLY:
        raise CommandProblem(f"{word}: this is a replay, nothing runs here: lockstep tui MODEL runs one")
    raise CommandProblem(f"{word}: no such command here; try {', '.join(WORDS[-8:])}, next, step, continue")


def complete(line: str, overview: Overview | None, panes: Sequence[str]) -> list[str]:
    """What the line may become."""
    word, space, rest = line.partition(" ")
    if not space:
        return [known for known in WORDS if known.startswith(word)]
    if overview is None:
        return []
    choices: Sequence[str] = ()
    if word in ("print", "x", "frame", "tap", "until", "p"):
        choices = overview.taps
    elif word == "branch":
        choices = [branch.name for branch in overview.branches]
    elif word == "pane":
        choices = panes
    return [f"{word} {choice}" for choice in choices if choice.startswith(rest)][:50]


def _whole(text: str, usage: str) -> int:
    if not text.lstrip("-").isdigit():
        raise CommandProblem(f"{text or 'nothing'} is not a whole number: {usage}")
    return int(text)


def _tap(text: str, overview: Overview) -> int:
    name = text.partition("[")[0].strip()
    found = [i for i, tap in enumerate(overview.taps) if tap == name or (name and fnmatchcase(tap, name))]
    if not found:
        raise CommandProblem(f"no tap {name!r}: a name or a glob such as layers.0.attn.scores")
    return found[0]


def _branch(text: str, overview: Overview) -> int:
    for branch in overview.branches:
        if text in (branch.name, str(branch.id)):
            return branch.id
    known = ", ".join(branch.name for branch in overview.branches[:8])
    raise CommandProblem(f"no branch {text!r}: there are {known}")


def _pane(text: str, panes: Sequence[str]) -> int:
    for number, title in enumerate(panes, 1):
        if text == str(number) or (text and title.lower().startswith(text.lower())):
            return number
    raise CommandProblem(f"no pane {text!r}: there are {', '.join(panes)}")
