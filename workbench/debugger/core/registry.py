"""The one registry of commands: prompt, scripts, `help`, the interface's keys, palette and key reference.

    @command("next", "n", arguments=(Argument("count", "int", default=1),), group="running", changes=True,
             key=Key("n", "next token"), help="run to the end of the next token step")
    def next_step(debugger, count): ...

A line is a command word (any unambiguous beginning will do) and its arguments. Torch-free.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Literal, get_args

from lockstep.engine.text import did_you_mean
from lockstep.sessions.text import clean
from lockstep.workbench.debugger.errors import CommandError

if TYPE_CHECKING:
    from lockstep.workbench.debugger.answers import Result

#: What an argument is: decides how it is read, and what completion offers. "text" takes the rest of the line.
Kind = Literal["int", "word", "tap", "location", "fault", "branch", "breakpoint", "file", "text", "flag"]
Group = Literal["running", "reversing", "breaking", "inspection", "changing", "checking", "session"]
#: In the order of the manual.
GROUPS: tuple[Group, ...] = get_args(Group)

#: What an argument is once it was read.
ArgumentValue = str | int | bool | None

REPLAY_REASON = "this is a replay: it needs the model (`lockstep run MODEL`)"


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a command. A flag is written `--name` and is a bool. `form`: what to write for it, where
    its name alone does not show it."""

    name: str
    kind: Kind = "word"
    required: bool = False
    default: ArgumentValue = None
    help: str = ""
    choices: tuple[str, ...] = ()
    form: str = ""

    def usage(self) -> str:
        """As the usage line shows it."""
        shown = f"--{self.name.replace('_', '-')}" if self.kind == "flag" else self.form or self.name.upper()
        return shown if self.required else f"[{shown}]"


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a command in the screens: Textual's name for it, what it does in a few words, and in one word where it
    stands in the footer. `line`: what it runs, where that is not the command's name alone."""

    press: str
    what: str
    footer: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """One command, as interfaces in any process know it. `changes`: it is journalled, so that the session is a
    script. `engine`: it cannot be had in a replay. `inside`: it moves from operation to operation inside a step."""

    name: str
    aliases: tuple[str, ...]
    arguments: tuple[Argument, ...]
    group: Group
    help: str
    details: str
    changes: bool
    engine: bool
    inside: bool
    key: Key | None

    @property
    def usage(self) -> str:
        """ "next [COUNT]"."""
        return " ".join([self.name, *(argument.usage() for argument in self.arguments)])


_DEBUGGER = "lockstep.workbench.debugger.commands"
#: The modules that have commands, in the order of the manual. They are imported when a command is first asked for.
MODULES = (
    *(f"{_DEBUGGER}.{name}" for name in (
        "branches", "breakpoints", "capture", "diagnose", "diff", "frame", "golden", "help", "info", "lens", "print",
        "record", "reverse", "rules", "run", "script", "sequence", "split",
    )),
    "lockstep.workbench.export.command",
)  # fmt: skip
_COMMANDS: dict[str, Command] = {}
_FUNCTIONS: dict[str, Callable[..., Result]] = {}
_ALIASES: dict[str, str] = {}


def command(
    name: str,
    *aliases: str,
    arguments: tuple[Argument, ...] = (),
    group: Group,
    help: str,
    details: str = "",
    changes: bool = False,
    engine: bool = False,
    inside: bool = False,
    key: Key | None = None,
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Enter a function `(debugger, **arguments) -> Result` into the registry."""

    def register(run: Callable[..., Result]) -> Callable[..., Result]:
        for word in (name, *aliases):
            assert word not in {*_COMMANDS, *_ALIASES}, f"two commands are called {word}"
        _COMMANDS[name] = Command(
            name, aliases, arguments, group, help, details, changes, engine, inside, key
        )
        _FUNCTIONS[name] = run
        _ALIASES.update(dict.fromkeys(aliases, name))
        return run

    return register


@cache
def _complete() -> Mapping[str, Command]:
    """Every command by name, once all modules are there."""
    for module in MODULES:
        import_module(module)
    return _COMMANDS


def commands() -> Mapping[str, Command]:
    """Every command by name, in the order of the manual."""
    return dict(sorted(_complete().items(), key=lambda one: GROUPS.index(one[1].group)))


def function_of(spec: Command) -> Callable[..., Result]:
    """What carries a command out: `(debugger, **arguments) -> Result`."""
    return _FUNCTIONS[spec.name]


def find(word: str) -> Command:
    """The command that a word means: its name, an alias, or the beginning of only one name."""
    known_commands = _complete()
    name = _ALIASES.get(word, word)
    if name in known_commands:
        return known_commands[name]
    shown = clean(word, limit=40)
    beginnings = [known for known in known_commands if known.startswith(word)] if word else []
    if len(beginnings) == 1:
        return _COMMANDS[beginnings[0]]
    if beginnings:
        raise CommandError(f"{shown!r} is ambiguous: {', '.join(beginnings)}")
    advice = did_you_mean(word, [*known_commands, *_ALIASES], "try `help`", most=2, cutoff=0.7)
    raise CommandError(f"there is no command {shown!r}: {advice}")


def parse_line(line: str) -> tuple[Command, dict[str, ArgumentValue]]:
    """A line -> its command and the arguments by name."""
    word, _, rest = line.strip().partition(" ")
    found = find(word)
    return found, _arguments(found, rest.strip(), line)


def check_arguments(spec: Command, given: Mapping[str, ArgumentValue]) -> dict[str, ArgumentValue]:
    """Arguments given by name (not as a line): types checked, defaults filled in."""
    known = {argument.name: argument for argument in spec.arguments}
    for name in given:
        if name not in known:
            raise CommandError(f"{spec.name} has no argument {clean(name, limit=40)!r}: usage: {spec.usage}")
    values = {}
    for name, argument in known.items():
        value = given.get(name)
        if value is None:
            value = argument.default
        if value is None and argument.required:
            raise CommandError(f"{spec.name}: {argument.name} is missing: usage: {spec.usage}")
        values[name] = bool(value) if argument.kind == "flag" else _converted(argument, value, spec)
    return values


def line_of(spec: Command, arguments: Mapping[str, ArgumentValue]) -> str:
    """The line that means this call."""
    words = [spec.name]
    for argument in spec.arguments:
        value = arguments.get(argument.name)
        if argument.kind == "flag":
            words += [f"--{argument.name.replace('_', '-')}"] * bool(value)
        elif value is not None and (value != argument.default or argument.required):
            words.append(shlex.quote(str(value)) if argument.kind == "file" else str(value))
    return " ".join(words)


def _arguments(spec: Command, rest: str, line: str) -> dict[str, ArgumentValue]:
    values: dict[str, ArgumentValue] = {}
    flags = {f"--{a.name.replace('_', '-')}": a for a in spec.arguments if a.kind == "flag"}
    words = rest.split()
    for flag, argument in flags.items():
        values[argument.name] = flag in words
        if flag in words:
            words.remove(flag)
    if flags:
        rest = " ".join(words)
    for argument in spec.arguments:
        if argument.kind == "flag":
            continue
        if argument.kind == "text":
            word, rest = rest, ""
        elif argument.kind == "file":
            word, rest = _file_word(rest)
        else:
            word, _, rest = rest.partition(" ")
            rest = rest.strip()
        if not word and argument.required:
            raise CommandError(f"{spec.name}: {argument.name} is missing: usage: {spec.usage}", line)
        values[argument.name] = _converted(argument, word, spec) if word else argument.default
    if rest:
        where = line.rfind(rest)
        raise CommandError(
            f"{spec.name}: unexpected {clean(rest, limit=60)!r}: usage: {spec.usage}", line, where
        )
    return values


def _converted(argument: Argument, value: ArgumentValue, spec: Command) -> ArgumentValue:
    if value is None:
        return None
    if argument.kind == "int":
        try:
            return int(value)
        except (TypeError, ValueError):
            shown = clean(str(value), limit=40)
            raise CommandError(
                f"{spec.name}: {argument.name} must be a whole number, not {shown!r}"
            ) from None
    if not isinstance(value, str):
        raise CommandError(f"{spec.name}: {argument.name} must be text, not {type(value).__name__}")
    if argument.kind == "file" and "\0" in value:
        raise CommandError(f"{spec.name}: no file's name has a NUL character in it")
    return _chosen(argument, value, spec) if argument.choices else value


def _chosen(argument: Argument, word: str, spec: Command) -> str:
    """The choice that a word means: the choice itself, or the beginning of only one."""
    beginnings = [one for one in argument.choices if one.startswith(word)]
    if word in argument.choices or len(beginnings) == 1:
        return word if word in argument.choices else beginnings[0]
    shown = clean(word, limit=40)
    if beginnings:
        raise CommandError(f"{spec.name}: {shown!r} is ambiguous: {', '.join(beginnings)}")
    raise CommandError(
        f"{spec.name}: {argument.name} must be one of {', '.join(argument.choices)}, not {shown!r}"
    )


def _file_word(rest: str) -> tuple[str, str]:
    """A file name, quoted where it holds spaces, and what follows it."""
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise CommandError(f"{error}: close the quotation") from None
    return (words[0], shlex.join(words[1:])) if words else ("", "")
