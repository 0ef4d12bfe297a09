"""How the page shows a token: its classes, its title, and what its script is told of each step."""

from __future__ import annotations

import json
import math

from markupsafe import Markup

from workbench.export.json import jsonable
from workbench.export.numbers import number
from workbench.views.sequence_tokens import BranchTokens, EmittedToken, SequenceTokens


def token_data(tokens: SequenceTokens, now: int | None) -> Markup:
    """What the script shows of each step, as JSON that cannot end the element it stands in."""
    data = {
        "steps": tokens.steps,
        "now": now,
        "lines": [
            {"name": line.name, "choices": {str(c.step): _choice(c) for c in line.choices if c is not None}}
            for line in tokens.lines
        ],
    }
    text = json.dumps(jsonable(data), separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _choice(choice: EmittedToken) -> dict[str, object]:
    notes = ["forced"] if choice.forced else []
    if choice.entropy is not None:
        notes.append(f"entropy {number(choice.entropy)}")
    return {
        "label": choice.label,
        "note": " · ".join(notes),
        "top": [
            [one.label, _rounded(one.probability), number(one.logit, 4), one.chosen]
            for one in choice.candidates
        ],
    }


def _rounded(probability: float | None) -> float | str | None:
    """For the script: a number, or the word to show in its place."""
    if probability is None:
        return None
    return round(probability, 6) if math.isfinite(probability) else number(probability)


def token_class(choice: EmittedToken, line: BranchTokens, now: int | None, row: int) -> str:
    """The CSS classes of a cell; `row` counts the branches shown."""
    names = []
    if choice.probability is not None and math.isfinite(choice.probability):
        names.append(f"p{round(10 * choice.probability)}")
    if row and not choice.own:
        names.append("shared")
    if choice.differs:
        names.append("differs")
    if choice.step == line.first_difference:
        names.append("parts")
    if choice.step == now:
        names.append("now")
    return " ".join(names)


def token_title(choice: EmittedToken) -> str:
    """What a pointer resting on the cell is told."""
    chance = "" if choice.probability is None else f", p {percent(choice.probability)}"
    return f"step {choice.step}{chance}{', forced' if choice.forced else ''}"


def percent(probability: float | None) -> str:
    """A probability for people."""
    if probability is None:
        return ""
    if not math.isfinite(probability):
        return number(probability)
    return "<0.01 %" if probability < 5e-5 else f"{100 * probability:.{2 if probability < 0.1 else 1}f} %"
