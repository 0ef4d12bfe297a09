"""What `run` and `replay` share: commands from scripts, the command line and a pipe, then the `(lockstep)` prompt."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.workbench.cli.console import Console, Line
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.language.scripts import read_script, script_lines
from lockstep.workbench.exit_codes import Exit


def commands_of(scripts: Sequence[Path], words: Sequence[str]) -> list[Line]:
    """What is to be done: the scripts', then those given one by one. CommandError for an unreadable script."""
    found = [(f"{path.name}:{number}", line) for path in scripts for number, line in read_script(path)]
    return found + [(f"--ex {number}", line) for number, line in enumerate(words, 1)]


def piped_commands() -> list[Line]:
    """Commands on standard input, where that is no terminal."""
    if sys.stdin.isatty():
        return []
    return [(f"stdin:{number}", line) for number, line in script_lines(sys.stdin.read(), "stdin")]


def converse(
    debugger: Debugger, lines: Sequence[Line], *, batch: bool, as_json: bool, limit: float | None = None
) -> Exit:
    """Carry out the commands, in `limit` seconds; then, at a terminal and unless `batch`, ask for more."""
    console = Console(debugger, as_json=as_json)
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not batch
    with console.interruptible(limit, batch=not at_terminal):
        code = console.run(lines)
    if not at_terminal or code not in (Exit.OK, Exit.DIVERGED):
        return code
    # Imported here: prompt_toolkit takes a fifth of a second, and only a terminal needs it.
    from lockstep.workbench.cli.prompt import interact

    with console.interruptible(None, batch=False):
        return interact(console)
