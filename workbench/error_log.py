"""Exceptions that nobody expected, kept with their tracebacks for a bug report. Light: nothing but the standard library
is imported before something fails."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from lockstep.engine.folders import private_folder
from lockstep.engine.text import printable
from lockstep.workbench.exit_codes import Exit

#: The log begins anew when it has grown to this many bytes; the one before is kept beside it.
_MOST_BYTES = 1 << 20
#: The packages that an import may miss by a mistake of ours alone.
_OURS = ("lockstep",)
#: Characters of one entry that are kept, half of them from its end: a stranger's values may be long.
_MOST_CHARACTERS = 1 << 16


def debugging() -> bool:
    """Whether `$LOCKSTEP_DEBUG` asks that an unexpected exception ends the program with its traceback."""
    return bool(os.environ.get("LOCKSTEP_DEBUG"))


def guarded(program: Callable[[], int], name: str = "lockstep") -> int:
    """The outermost net of a process: the exit code of `program`. What gets past its own nets is one line on stderr;
    Python's code for it, 1, would be taken for a divergence."""
    try:
        return program()
    except KeyboardInterrupt:
        raise  # Python ends the process as SIGINT does
    except SystemExit as ended:
        code = 0 if ended.code is None else ended.code
        if isinstance(code, int) and code != Exit.DIVERGED:
            return code
        return _give_up(name, Exit.DEFECT, f"something asked to end it: {code}")
    except BaseException as error:
        code, stated = explain_unexpected(error)
        return _give_up(name, code, stated)


def _give_up(name: str, code: Exit, text: str) -> Exit:
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
        print(f"{name}: error: {printable(text, 1000)}", file=sys.stderr, flush=True)
    return code


def explain_unexpected(error: BaseException) -> tuple[Exit, str]:
    """The exit code and the line for an exception that is none of ours. A defect is written into the log."""
    stated = f"{type(error).__name__}: {printable(error, 300)}".removesuffix(": ")
    if isinstance(error, MemoryError):
        return (
            Exit.CANNOT_LOAD,
            f"out of memory ({stated}): take a smaller model or input, or end other programs",
        )
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] not in _OURS:
        return Exit.CANNOT_LOAD, f"{stated}: the installation is not whole: install lockstep again"
    try:
        where = f"its traceback {record(error)}"
    except BaseException as problem:  # what is broken may be what the log needs
        where = f"its traceback could not be kept ({type(problem).__name__}); LOCKSTEP_DEBUG=1 shows it"
    return Exit.DEFECT, f"{stated} (a defect of lockstep; {where})"


def survive(error: Exception) -> str:
    """The line for a defect of a part without which the rest goes on; with `$LOCKSTEP_DEBUG` it is raised again."""
    if debugging():
        raise error
    return explain_unexpected(error)[1]


def log_file() -> Path:
    """Where they are kept."""
    # Imported here: it needs a library, and a damaged installation is to be reported as well.
    from lockstep.engine.folders import state_directory

    return state_directory() / "errors.log"


def record(error: BaseException, doing: str = "") -> str:
    """Add an exception with its traceback and what was being done; returns where a reader finds it, in words."""
    # Imported here: it takes numpy along, which the first paint does not wait for.
    from lockstep.sessions.text import clean

    reported = "".join(traceback.format_exception(error))
    if len(reported) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        reported = f"{reported[:half]}\n…\n{reported[-half:]}"
    entry = f"{datetime.now().isoformat(' ', 'seconds')} {clean(doing, limit=200)}\n{clean(reported, newlines=True)}\n"
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
