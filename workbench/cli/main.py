"""The `lockstep` program: goes to the screens or to a subcommand, turns errors into one line and an exit code.

Light: `lockstep --help` imports no subcommand, as names and help lines stand in `subcommands`; a bare `lockstep` and
`lockstep tui SESSION` not even Typer.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from io import TextIOWrapper

from lockstep.engine.text import printable
from lockstep.workbench import error_log
from lockstep.workbench.cli import ending
from lockstep.workbench.cli.screens import straight
from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.exit_codes import Exit

#: The environment variable by which a shell asks for completions.
COMPLETION = "_LOCKSTEP_COMPLETE"
#: Commands that start an engine at once, unless they are asked for help, or their ranks are started by torchrun.
_OF_AN_ENGINE, _NO_RANK = ("generate", "run", "check"), ("--help", "--listen")
#: How errors of a command line begin that ask for what a command takes.
_TAKES = ("Missing ", "Got unexpected ", "No such option")


def run(arguments: list[str]) -> int:
    """Run one command line (without the program's name) and return the exit code."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own or error_log.debugging()
    words = [word for word in own if word != "--debug"] + arguments[len(own) :]
    return _caught(lambda: _command(words), debug)


def _command(words: list[str]) -> int:
    with _ranks_standing_by(words):
        return _invoked(words)


def _ranks_standing_by(words: list[str]) -> contextlib.AbstractContextManager[None]:
    """The ranks of a command that starts an engine, started while the command itself is imported and read: as many as
    there are cores at most, as more would keep it from that."""
    command, target = [*words, "", ""][:2]
    none = any(word.startswith(_NO_RANK) for word in words) or target.endswith(".session")  # a recording
    asked = re.findall(r"--tp[ =](\S+)", " ".join(words)) or ["1"]
    if none or command not in _OF_AN_ENGINE or re.fullmatch("[1-9][0-9]{0,3}", asked[-1]) is None:
        return contextlib.nullcontext()
    from lockstep.engine.machine import default_threads, usable_cores
    from lockstep.engine.ranks.standby import standing_by
    from lockstep.workbench.inferior.rank_program import RANK_PROGRAM

    ranks = int(asked[-1])
    return standing_by(RANK_PROGRAM, default_threads(ranks), min(ranks, usable_cores()))


def _invoked(words: list[str]) -> int:
    # Imported here: screens come before Typer would be there.
    import typer

    from lockstep.workbench.cli import root

    command = typer.main.get_command(root.app)
    try:
        with command.make_context("lockstep", words) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as ended:
        return ended.exit_code
    except typer.TyperException as error:  # a command line that does not parse
        stated = "\n".join(printable(line, 2000) for line in error.format_message().splitlines())
        asked = getattr(error, "ctx", None)
        if stated.startswith(_TAKES) and asked is not None:
            stated = f"{stated.rstrip('.')}. `{asked.command_path} --help` shows what it takes."
        print(f"lockstep: error: {stated}", file=sys.stderr)
        return Exit.USAGE
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    return Exit.OK


def _caught(act: Callable[[], int], debug: bool) -> int:
    """The exit code of `act`; what it raises, of whatever kind, is one line and its exit code."""
    try:
        code = act()
        if code == Exit.DIVERGED and not isinstance(code, Exit):
            raise AssertionError("an exit code of 1 that is no verdict")
        return code
    except KeyboardInterrupt:
        return ending.report_signal(signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return Exit.PIPE_CLOSED
    except ending.Ended:
        raise
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # Rich's answer to it
            return Exit.PIPE_CLOSED
        if not ended.code:  # Typer's after --install-completion
            return Exit.OK
        return _report(ended, debug)
    except BaseException as error:  # libraries in Rust panic past Exception
        return _report(error, debug)


def _report(error: BaseException, debug: bool) -> Exit:
    # Imported here: numpy and SQLite come along, which help and usage errors need not wait for.
    from lockstep.sessions import clean
    from lockstep.workbench.debugger.failures import explain, last_operations

    code, message = explain(error)
    if debug:
        shown = "".join(traceback.format_exception(error))
        print(clean(shown, newlines=True), end="", file=sys.stderr)
    report_line("\n".join([f"error: {message}", *last_operations(error)]))
    return code


def complete(instruction: str) -> int:
    """Answer the shell, whose script `--install-completion` has installed: it asks by an environment variable."""
    # Imported here: whoever completes nothing needs none of it.
    import typer
    from typer.completion import shell_complete

    from lockstep.workbench.cli import root

    return shell_complete(typer.main.get_command(root.app), {}, "lockstep", COMPLETION, instruction)


def main() -> int:
    """The console script; returns its exit code."""
    if asked := os.environ.get(COMPLETION):
        return _caught(lambda: complete(asked), error_log.debugging())
    # A session of NaN and infinities is shown as such; numpy need not warn of them as well.
    warnings.simplefilter("ignore", RuntimeWarning)
    closed = _closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # question marks, not a crash, where it is not UTF-8
    if "stdout" in closed:
        report_line("error: stdout is closed: redirect it to /dev/null where its output is not wanted")
        return Exit.USAGE
    ending.on_signals()
    threading.excepthook = _thread_failed
    arguments, code = sys.argv[1:], 0
    with contextlib.suppress(ending.Ended):
        code = _caught(lambda: _started(arguments), error_log.debugging())
    return ending.report_signal(number) if (number := ending.received()) else code


def _started(arguments: list[str]) -> int:
    code = straight(arguments)
    return run(arguments) if code is None else code


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    """An exception that ended a thread: one line, as everywhere; the program goes on without it."""
    if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
        _report(failed.exc_value, error_log.debugging())


def _closed_streams() -> list[str]:
    """Which standard streams the program was started without. Each is opened on the null device: otherwise the next
    file that is opened would take its number, and be written to by whatever prints."""
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        mode = "r" if name == "stdin" else "w"
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open while the program runs
    return closed
