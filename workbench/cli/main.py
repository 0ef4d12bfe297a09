"""The `lockstep` program: goes to the screens or to a subcommand, turns errors into one line and an exit code.

Light: `lockstep --help` imports no subcommand, as names and help lines stand in `subcommands`; a bare `lockstep` and
`lockstep tui SESSION` not even Typer.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from io import TextIOWrapper

from engine.text import printable
from workbench import error_log
from workbench.cli import ending
from workbench.cli.screens import straight
from workbench.cli.terminal import tell
from workbench.exit_codes import Exit

#: The environment variable by which a shell asks for completions.
COMPLETION = "_LOCKSTEP_COMPLETE"


def run(arguments: list[str]) -> int:
    """Run one command line (without the program's name) and return the exit code."""
    # Imported here: screens come before Typer would be there.
    import typer

    from workbench.cli import root

    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own or error_log.debugging()
    words = [word for word in own if word != "--debug"] + arguments[len(own) :]
    command = typer.main.get_command(root.app)
    try:
        with command.make_context("lockstep", words) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as ended:
        return ended.exit_code
    except typer.TyperException as error:  # a command line that does not parse
        said = "\n".join(printable(line, 2000) for line in error.format_message().splitlines())
        print(f"lockstep: error: {said}", file=sys.stderr)
        return Exit.USAGE
    except (KeyboardInterrupt, typer.Abort):
        return ending.say(signal.SIGINT)
    except SystemExit as ended:  # Rich's answer to a closed pipe; Typer's after --install-completion
        return Exit.PIPE_CLOSED if ended.code else Exit.OK
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return Exit.PIPE_CLOSED
    except Exception as error:
        # Imported here: numpy and SQLite come along, which help and usage errors need not wait for.
        from sessions import clean
        from workbench.debugger.failures import explain, last_operations

        code, message = explain(error)
        if debug:
            print(clean(traceback.format_exc(), newlines=True), end="", file=sys.stderr)
        tell("\n".join([f"error: {message}", *last_operations(error)]))
        return code
    return Exit.OK


def complete(instruction: str) -> int:
    """Answer the shell, whose script `--install-completion` has installed: it asks by an environment variable."""
    # Imported here: whoever completes nothing needs none of it.
    import typer
    from typer.completion import shell_complete

    from workbench.cli import root

    return shell_complete(typer.main.get_command(root.app), {}, "lockstep", COMPLETION, instruction)


def main() -> None:
    """The console script."""
    if asked := os.environ.get(COMPLETION):
        sys.exit(complete(asked))
    # A session of NaN and infinities is shown as such; numpy need not warn of them as well.
    warnings.simplefilter("ignore", RuntimeWarning)
    closed = _closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # question marks, not a crash, where it is not UTF-8
    if "stdout" in closed:
        tell("error: stdout is closed: redirect it to /dev/null where its output is not wanted")
        sys.exit(Exit.USAGE)
    ending.on_signals()
    try:
        code = straight(sys.argv[1:])
        code = run(sys.argv[1:]) if code is None else code
    except ending.Ended:
        code = 0
    except KeyboardInterrupt:  # in the imports of a command
        code = ending.say(signal.SIGINT)
    sys.exit(ending.say(number) if (number := ending.received()) else code)


def _closed_streams() -> list[str]:
    """Which standard streams the program was started without. Each is opened on the null device: otherwise the next
    file that is opened would take its number, and be written to by whatever prints."""
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        mode = "r" if name == "stdin" else "w"
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open while the program runs
    return closed
