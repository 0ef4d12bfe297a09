"""The screens, as soon as can be: bare `lockstep` (or `lockstep tui`), and `lockstep tui SESSION`."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path

from lockstep.workbench.cli.terminal import no_screens, shown_meanwhile
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.paths import session_of


def open_home() -> int:
    """The home screen; returns an exit code."""
    return _open(None)


def open_session(path: Path) -> int:
    """A saved session; returns an exit code."""
    return _open(path)


def straight(arguments: list[str]) -> int | None:
    """The exit code of a command line that only opens screens, none for any other: it is on screen before Typer would
    be imported. It means the same as Typer's."""
    if no_screens():
        return None
    if arguments in ([], ["tui"]):
        return open_home()
    path = None
    if arguments[0] == "tui" and len(arguments) == 2 and not arguments[1].startswith("-"):
        with suppress(OSError):  # Typer's way reports what is wrong
            path = session_of(arguments[1])
    return None if path is None else open_session(path)


def _open(path: Path | None) -> int:
    """The screens have garbage collected again once they stand."""
    # Modules are no garbage: a walk through them all, time and again while they load, would delay the first paint.
    gc.disable()
    try:
        with shown_meanwhile("lockstep …" if path is None else f"lockstep: opening {path.name} …"):
            # Imported here: textual is not for those who only want a subcommand.
            from lockstep.workbench.tui.launch import run_home, run_session

        return run_home() if path is None else run_session(path)
    except KeyboardInterrupt:  # before the screens took the keys
        return Exit.INTERRUPTED
    finally:
        gc.enable()
