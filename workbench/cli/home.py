"""Bare `lockstep`: the home screen."""

from __future__ import annotations

import gc

from workbench.exit_codes import Exit


def open_home() -> int:
    """The home screen; returns an exit code. The screens have garbage collected again once they stand."""
    # Modules are no garbage: a walk through them all, time and again while they load, would delay the first paint.
    gc.disable()
    try:
        # Imported here: textual is not for those who only want a subcommand.
        from workbench.tui.launch import run_home

        return run_home()
    except KeyboardInterrupt:  # before the screens took the keys
        return Exit.INTERRUPTED
