"""How the page shows a token: its classes, its title, and what its script is given of each step."""

from __future__ import annotations

import json
import math

from markupsafe import Markup

from lockstep.workbench.export.json import jsonable
from lockstep.workbench.views.sequence_tokens import BranchTokens, EmittedToken, SequenceTokens
from lockstep.workbench.words.numbers import chance, number


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
            [one.label, chance(one.probability), number(one.logit, 4), one.chosen]
            for one in choice.candidates
        ],
    }


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
    """What is shown where a pointer rests on the cell."""
    known = "" if choice.probability is None else f", p {chance(choice.probability)}"
    return f"step {choice.step}{known}{', forced' if choice.forced else ''}"
