"""What happens inside an attached process and is no tensor: what was changed in the engine, and what failed.

A line of JSON each in DUMP/report-PID.jsonl, {"kind": "found" | "changed" | "failed", "text": …}, at most MOST of them;
a failure is also reported once on stderr. The engine goes on. Any Python 3 runs this file, as one on which the others
do not run is reported by it.
"""

import json
import os
import sys
import traceback

#: Lines of one process: what fails at each step of a long run must not fill the disk.
MOST = 200

_reported: "set[str]" = set()


def changed(text: str) -> None:
    """Something about the engine is not as its user asked for."""
    _write("changed", text)


def found(module: str) -> None:
    """A module of an engine was imported; the model is tapped when it is called."""
    _write("found", module)


def failed(what: str, error: Exception) -> None:
    """`what` raised `error`: nothing more of it is recorded."""
    text = f"{what}: {type(error).__name__}: {error}"
    if _new(text):
        _print(f"lockstep attach: {text} (the engine goes on)")
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        _write("failed", text + "\n" + trace[-4000:])


def _new(text: str) -> bool:
    if text in _reported or len(_reported) >= MOST:
        return False
    _reported.add(text)
    return True


def _write(kind: str, text: str) -> None:
    if not _new(kind + " " + text):
        return
    folder = os.environ.get("LOCKSTEP_TAP", "")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"report-{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "text": text}) + "\n")
    except OSError:
        _print(f"lockstep attach: cannot write to {folder!r}")


def _print(text: str) -> None:
    """On stderr, where there is one: an engine may have closed it."""
    try:
        if sys.stderr is not None:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
    except (OSError, ValueError):
        return
