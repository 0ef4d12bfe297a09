"""Exceptions that nobody expected, kept with their tracebacks for a bug report. Light: nothing but the standard library
is imported before something fails."""

from __future__ import annotations

import os
import traceback
from datetime import datetime
from pathlib import Path

from engine.folders import private_folder, state_directory

#: The log begins anew when it has grown to this many bytes; the one before is kept beside it.
_MOST_BYTES = 1 << 20
#: Characters of one entry that are kept, half of them from its end: a stranger's values may be long.
_MOST_CHARACTERS = 1 << 16


def debugging() -> bool:
    """Whether `$LOCKSTEP_DEBUG` asks that an unexpected exception ends the program with its traceback."""
    return bool(os.environ.get("LOCKSTEP_DEBUG"))


def log_file() -> Path:
    """Where they are kept."""
    return state_directory() / "errors.log"


def record(error: BaseException, doing: str = "") -> str:
    """Add an exception with its traceback and what was being done; returns where a reader finds it, in words."""
    # Imported here: it takes numpy along, which the first paint does not wait for.
    from sessions.text import clean

    told = "".join(traceback.format_exception(error))
    if len(told) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        told = f"{told[:half]}\n…\n{told[-half:]}"
    entry = f"{datetime.now().isoformat(' ', 'seconds')} {clean(doing, limit=200)}\n{clean(told, newlines=True)}\n"
    file = log_file()
    try:
        private_folder(file.parent)
        if file.exists() and file.stat().st_size > _MOST_BYTES:
            file.replace(file.with_name(f"{file.name}.1"))
        handle = os.open(
            file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )  # a value may be anybody's prompt
        with open(handle, "a", encoding="utf-8", errors="backslashreplace") as out:
            out.write(entry)
    except OSError as problem:
        return f"could not be kept in {clean(str(file))} ({problem.strerror}); LOCKSTEP_DEBUG=1 shows it"
    return f"is in {clean(str(file))}"
