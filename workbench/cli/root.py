"""The root of the command line, in Typer's terms. It imports only the subcommand that is used."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import lockstep
from lockstep.workbench.cli.screens import open_home
from lockstep.workbench.cli.subcommands import COMMANDS, FORMER
from lockstep.workbench.cli.terminal import no_screens
from lockstep.workbench.exit_codes import Exit


def load(name: str) -> Any:
    """The command behind a name, as Typer builds it."""
    module, _ = COMMANDS[name]
    command = typer.main.get_command(import_module(module).app)
    command.name = name
    return command


def _readable(command: Any, context: Any) -> None:
    """What Typer's help has to be given: paragraphs flow to the terminal's width, whatever the source's lines; a flag
    takes no value, so that no type is named (it prints `<bool>` otherwise)."""
    if command.help:
        command.help = "\n\n".join(" ".join(one.split()) for one in cleandoc(command.help).split("\n\n"))
    for option in command.get_params(context):
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for action in getattr(command, "commands", {}).values():
        _readable(action, context)


class _Commands(TyperGroup):
    """Shows every subcommand by its help line and imports only the one that is used."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: TyperCommand(name, help=line) for name, (_, line) in COMMANDS.items()}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As ever; its own help may be asked for here."""
        _readable(self, ctx)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The real command in place of the one that help shows."""
        name, shown, rest = super().resolve_command(ctx, [FORMER.get(args[0], args[0]), *args[1:]])
        if name is None:
            return name, shown, rest
        _readable(command := load(name), ctx)
        return name, command, rest


app = typer.Typer(cls=_Commands, rich_markup_mode="rich")


@app.callback(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (anywhere on the command line).")
    ] = False,
) -> None:
    """A debugger for tensor-parallel LLM inference: step, inspect, compare, replay.

    Without a command it opens the screens. MODEL is a Hugging Face directory, a GGUF file, a hub id, or `demo`.
    """
    if version:
        print(f"lockstep {lockstep.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        _home(context)


def _home(context: typer.Context) -> None:
    """Bare `lockstep`: the screens, where there is a terminal to show them on."""
    if why := no_screens():
        print(f"lockstep: {why}: name a command\n", file=sys.stderr)
        with redirect_stdout(sys.stderr):  # Rich prints it there and then
            print(context.get_help())
        raise typer.Exit(Exit.USAGE)
    raise typer.Exit(open_home())
