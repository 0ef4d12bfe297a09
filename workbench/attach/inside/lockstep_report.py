"""What happens inside an attached process and is no tensor: what was changed in the engine, and what failed.

A line of JSON each in DUMP/report-PID.jsonl, {"kind": "found" | "changed" | "failed", "text": …}; a failure is also
told once on stderr. The engine goes on.
"""

import json
import os
import sys
import traceback

_told: set[str] = set()


def changed(text: str) -> None:
    """Something about the engine is not as its user asked for."""
    _write("changed", text)


def found(module: str) -> None:
    """A module of an engine was imported; the model is tapped when it is called."""
    _write("found", module)


def failed(what: str, error: Exception) -> None:
    """`what` raised `error`: nothing more of it is recorded."""
    text = f"{what}: {type(error).__name__}: {error}"
    if text not in _told:
        _told.add(text)
        print(f"lockstep attach: {text} (the engine goes on)", file=sys.stderr, flush=True)
        _write("failed", text + "\n" + "".join(traceback.format_exception(error))[-4000:])


def _write(kind: str, text: str) -> None:
    folder = os.environ.get("LOCKSTEP_TAP", "")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"report-{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "text": text}) + "\n")
    except OSError:
        print(f"lockstep attach: cannot write to {folder!r}", file=sys.stderr, flush=True)
