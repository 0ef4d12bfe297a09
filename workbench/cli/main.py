"""The `lockstep` program: finds the subcommand, turns errors into one line and an exit code.

`lockstep --help` imports no subcommand: names and help lines stand in COMMANDS. A subcommand is a module
with a Typer `app`; adding one is one line here.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import redirect_stdout
from importlib import import_module, metadata
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from workbench.cli.exit import Exit

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


def load(name: str) -> Any:
    """The command behind a name, as Typer builds it."""
    module, _ = COMMANDS[name]
    command = typer.main.get_command(import_module(module).app)
    command.name = name
    return command


class _Commands(TyperGroup):
    """Shows every subcommand by its help line and imports only the one that is used."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: TyperCommand(name, help=line) for name, (_, line) in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The real command in place of the one that help shows."""
        name, shown, rest = super().resolve_command(ctx, args)
        return name, shown if name is None else load(name), rest


app = typer.Typer(cls=_Commands, rich_markup_mode="rich", add_completion=False)


@app.callback(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Say which version this is.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (anywhere on the command line).")
    ] = False,
) -> None:
    """A debugger for tensor-parallel LLM inference: step, inspect, compare, replay.

    Without a command it opens the screens. MODEL is a Hugging Face directory, a hub id, or `demo`.
    """
    if version:
        print(f"lockstep {metadata.version('lockstep')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        _home(context)


def _home(context: typer.Context) -> None:
    """Bare `lockstep`: the screens, where there is a terminal to show them on."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("lockstep: not a terminal, so no screens: name a command\n", file=sys.stderr)
        with redirect_stdout(sys.stderr):  # Rich prints it there and then
            print(context.get_help())
        raise typer.Exit(Exit.USAGE)
    # Imported here: textual is not for those who only want a subcommand.
    from workbench.tui.launch import run_home

    raise typer.Exit(run_home())


def run(arguments: list[str]) -> int:
    """Run one command line (without the program's name) and return the exit code."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own
    words = [word for word in own if word != "--debug"] + arguments[len(own) :]
    command = typer.main.get_command(app)
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
        from workbench.cli.failures import explain

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
            stream.reconfigure(
                errors="replace"
            )  # a terminal that is not UTF-8 gets question marks, not a crash
    sys.exit(run(sys.argv[1:]))


def _complain(message: str) -> None:
    print(f"lockstep: error: {message}", file=sys.stderr)
