"""The `lockstep` program: goes to the screens or to a subcommand, turns errors into one line and an exit code.

Light: `lockstep --help` imports no subcommand, as names and help lines stand in COMMANDS, and a bare `lockstep`
not even Typer. A subcommand is a module with a Typer `app`; adding one is one line here.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from io import TextIOWrapper

from workbench.cli.terminal import no_screens
from workbench.exit_codes import Exit

#: name -> (module, help line), in the order in which a newcomer needs them.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("workbench.cli.demo", "A bug, found and fixed before your eyes, in about a minute."),
    "tui": ("workbench.cli.tui", "Open the screens on a model or a session."),
    "run": ("workbench.cli.run", "Debug a model: step, break, look, go back, change, check."),
    "replay": ("workbench.cli.replay", "Replay a saved session, without the model."),
    "sessions": ("workbench.cli.sessions", "List, show, verify, pack or remove saved sessions."),
    "diff": ("workbench.cli.diff", "Compare two sessions, tap by tap."),
    "generate": ("workbench.cli.generate", "Generate text from one or more prompts."),
    "check": ("workbench.cli.check", "Hold the engine against transformers, tap by tap."),
    "export": ("workbench.cli.export", "Write a session as a report, a picture, a table or a test result."),
    "web": ("workbench.cli.web", "The screens in a browser of this machine."),
    "inspect": ("workbench.cli.inspect", "What a checkpoint holds, and which rank gets what of it."),
    "toggles": ("workbench.cli.toggles", "List the known bugs that --rule switches on."),
    "doctor": ("workbench.cli.doctor", "Check that this machine has what is needed."),
}


def run(arguments: list[str]) -> int:
    """Run one command line (without the program's name) and return the exit code."""
    # Imported here: a bare `lockstep` is on screen before Typer would be.
    import typer

    from workbench.cli import root

    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own
    words = [word for word in own if word != "--debug"] + arguments[len(own) :]
    command = typer.main.get_command(root.app)
    try:
        with command.make_context("lockstep", words) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as ended:
        return ended.exit_code
    except typer.TyperException as error:  # a command line that does not parse
        _complain(error.format_message())
        return Exit.USAGE
    except (KeyboardInterrupt, typer.Abort):
        print("lockstep: interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    except SystemExit:  # Rich's answer to a closed pipe
        return Exit.PIPE_CLOSED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return Exit.PIPE_CLOSED
    except Exception as error:
        # Imported here: numpy and SQLite come along, which help and usage errors need not wait for.
        from workbench.debugger.failures import explain

        code, message = explain(error)
        if debug:
            traceback.print_exc()
        _complain(message)
        return code
    return Exit.OK


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # question marks, not a crash, where it is not UTF-8
    sys.exit(run(sys.argv[1:]) if sys.argv[1:] or no_screens() else home())


def home() -> int:
    """The home screen; returns an exit code. The screens have garbage collected again once they stand."""
    # Modules are no garbage: a walk through them all, time and again while they load, would delay the first paint.
    gc.disable()
    try:
        # Imported here: textual is not for those who only want a subcommand.
        from workbench.tui.launch import run_home

        return run_home()
    except KeyboardInterrupt:  # before the screens took the keys
        return Exit.INTERRUPTED


def _complain(message: str) -> None:
    print(f"lockstep: error: {message}", file=sys.stderr)
