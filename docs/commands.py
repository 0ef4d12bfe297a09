"""The page of all commands, from their own help.

python docs/commands.py           # prints it
python docs/commands.py --write   # into docs/commands.md
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import typer

from lockstep.workbench.cli.root import load
from lockstep.workbench.cli.subcommands import COMMANDS
from lockstep.workbench.debugger.core import registry

PAGE = Path(__file__).with_name("commands.md")
_HEAD = """# Commands

Made by `python docs/commands.py` from the commands' own help: `lockstep COMMAND --help` has the same. Every command
that prints data takes `--json`. SESSION is a file, a name as `lockstep sessions` lists it, or `gallery/NAME`. MODEL is
a Hugging Face directory, a GGUF file, a hub id, or `demo`.
"""


def page() -> str:
    """All subcommands with their options, then the commands of the debugger by group."""
    lines = [_HEAD]
    for name, (_, line) in COMMANDS.items():
        lines += [f"## lockstep {name}", "", line, "", *_command(name, load(name))]
    lines += [
        "## At the prompt",
        "",
        "Of `lockstep run` and `lockstep replay`, in scripts, and on the screens' `:` line.",
        "",
    ]
    for group in registry.GROUPS:
        lines += [f"### {group.capitalize()}", "", "| command | key | what it does |", "| --- | --- | --- |"]
        for one in registry.commands().values():
            if one.group == group:
                key = f"`{one.key.press}`" if one.key else ""
                lines.append(f"| `{_cell(one.usage)}` | {_cell(key)} | {_cell(one.help)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    """Its usage, its description, its arguments and options; the same of its actions."""
    actions = getattr(command, "commands", {})
    context = typer.Context(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    yield from ("```text", f"lockstep {name} {usage}", "```", "")
    for paragraph in (command.help or "").split("\n\n"):
        if text := " ".join(paragraph.split()):
            yield from (text, "")
    shown = [
        one
        for one in command.get_params(context)
        if "--help" not in one.opts and not getattr(one, "hidden", False)
    ]
    if shown:
        yield from ("| | |", "| --- | --- |")
        for one in shown:
            yield f"| {_option(one)} | {_cell((getattr(one, 'help', None) or '').replace(chr(92) + '[', '['))} |"
        yield ""
    for action, inner in actions.items():
        yield from (f"### lockstep {name} {action}", "", *_command(f"{name} {action}", inner))


def _option(one: Any) -> str:
    flag = getattr(one, "is_flag", False)
    metavar = "" if flag else f" {one.metavar}" if one.metavar else ""
    named = [word for word in (*one.opts, *one.secondary_opts) if word.startswith("-")]
    return (
        _cell(", ".join(f"`{word}`" for word in named) + (f" `{metavar.strip()}`" if metavar else ""))
        or f"`{one.name.upper()}`"
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        with redirect_stdout(io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8")):
            print(page(), end="")
