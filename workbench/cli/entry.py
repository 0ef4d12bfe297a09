"""The console script. What is imported before it can be interrupted is a matter of milliseconds."""

from __future__ import annotations

import signal


def main() -> int:
    """The `lockstep` program: its exit code, whatever happens. Ctrl+c while it is still being imported ends it
    without a traceback."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # a shell that starts it in the background has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lockstep.workbench.error_log import guarded

    def program() -> int:
        from lockstep.workbench.cli.main import main as imported

        signal.signal(signal.SIGINT, usual)
        return imported()

    return guarded(program)
