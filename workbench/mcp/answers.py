"""What a tool answers: a JSON object of at most 32 kB, with what it rests on."""

from __future__ import annotations

import json

from lockstep.sessions.text import clean
from lockstep.workbench.debugger.answers import JsonObject, jsonable
from lockstep.workbench.debugger.core.debugger import Debugger

#: Bytes of an answer.
LIMIT = 32_000


def answer(text: str, rests_on: JsonObject, **data: object) -> str:
    """`text` for reading, `rests_on` (session, branch, step, tap, ranks), and `data`: the same as plain values.

    What is too long loses `data` first, then the end of `text`; "cut" reports what is missing.
    """
    found = {"text": clean(text, newlines=True), "rests_on": rests_on, **data}
    if _size(whole := _written(found)) <= LIMIT:
        return whole
    found = {"text": found["text"], "rests_on": rests_on, "cut": f"left out: {', '.join(data) or 'no data'}"}
    lines = clean(text, newlines=True).splitlines()
    while _size(written := _written(found)) > LIMIT and lines:
        lines = lines[: len(lines) * 3 // 4] if len(lines) > 1 else [lines[0][: len(lines[0]) // 2]]
        found["text"] = "\n".join(lines)
        found["cut"] = "the end is left out: ask for a part (TAP[0, :8], a glob, a smaller count)"
    return written


def basis(debugger: Debugger) -> JsonObject:
    """Where a debugger stands: what its answers rest on."""
    at = debugger.position
    line = debugger.timeline.line(at.branch)
    return {
        "session": clean(debugger.session.path.name),
        "live": debugger.live,
        "branch": f"{line.id} ({clean(line.name)})",
        "step": at.step,
        "tap": clean(debugger.timeline.places.name(at.place)) or None,
        "sequence": debugger.sequence,
        "ranks": debugger.timeline.ranks,
    }


def _written(found: JsonObject) -> str:
    """JSON text, of which strings are stripped of what a terminal would act on."""
    return json.dumps(_cleaned(jsonable(found)), ensure_ascii=False)


def _size(written: str) -> int:
    return len(written.encode())


def _cleaned(value: object) -> object:
    if isinstance(value, str):
        return clean(value, newlines=True)
    if isinstance(value, list):
        return [_cleaned(one) for one in value]
    if isinstance(value, dict):
        return {clean(key): _cleaned(one) for key, one in value.items()}
    return value
