"""How the answer to a command is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.sessions.text import clean
from lockstep.workbench.tui.drivers.port import Reply

#: Reasons of stops that are marked as something wrong.
_WRONG = ("exception", "data breakpoint", "divergence")


@dataclass(frozen=True, slots=True)
class AsTensor:
    """On a screen of its own: the tap of that index."""

    tap: int


@dataclass(frozen=True, slots=True)
class AsSheet:
    """On a sheet over the screen."""

    text: str


@dataclass(frozen=True, slots=True)
class AsMessage:
    """In the message line; "" is nothing to report. `recorded`: the session's journal has it already."""

    text: str
    wrong: bool = False
    recorded: bool = False


def shown_as(reply: Reply, taps: Sequence[str]) -> AsTensor | AsSheet | AsMessage:
    """A whole tensor as such; one line into the message line; more into a sheet."""
    text, result = reply.text.strip(), reply.outcome
    if result.kind == "tensor" and not result.index and result.tap in taps:
        return AsTensor(taps.index(result.tap))
    if result.kind in ("origin", "golden"):
        # The cause is the last line of what golden prints, and the first that anybody wants.
        lines = text.splitlines()[:: -1 if result.kind == "golden" else 1]
        return AsMessage("; ".join(map(clean, lines)), result.verdict != "match")
    if "\n" in text and result.kind != "stopped":
        return AsSheet(text)
    wrong = result.reason in _WRONG or result.holds is False
    return AsMessage(clean(text, newlines=True), wrong, recorded=result.kind == "stopped")
