"""The `(lockstep)` prompt: history, completion from the registry, an empty line does the last motion again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from lockstep.engine.errors import RankError
from lockstep.engine.faults.catalogue import DEFAULTS, FAULTS
from lockstep.engine.folders import private_folder
from lockstep.sessions.text import clean
from lockstep.workbench.cli.console import Console
from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.debugger.core import registry
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.errors import CommandError, RunEnded
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.paths import data_directory
from lockstep.workbench.views.identity import model_name
from lockstep.workbench.words.plain_text import plural

#: Groups whose last command an empty line repeats.
_REPEATED = ("running", "reversing")


def history() -> History:
    """The lines of earlier prompts, for this user alone; of this one alone where none can be kept."""
    file = data_directory() / "history"
    try:
        private_folder(file.parent)
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    except OSError as error:
        report_line(f"note: the lines that you enter are not kept: {file}: {error.strerror}")
        return InMemoryHistory()
    return FileHistory(str(file))


def interact(console: Console) -> Exit:
    """Ask for commands until the user has enough."""
    asking: PromptSession[str] = PromptSession(
        history=history(), completer=DebuggerCompleter(console.debugger)
    )
    print(clean(greeting(console.debugger)))
    last = ""
    while not console.interrupted:
        try:
            line = asking.prompt("(lockstep) ").strip() or last
            if line.split(maxsplit=1)[:1] == ["commands"]:
                line = _block(asking, line)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return console.ended()
        if not line:
            continue
        last = line if _repeats(line) else ""
        try:
            console.show(line, console.debugger.execute(line))
        except RunEnded:
            return console.ended()
        except RankError as error:
            console.failed("", error)
            print("the session is kept: `restart` starts the engine again")
        except Exception as error:  # a defect is reported like any error; the session goes on
            console.failed("", error)
    return console.ended()


def greeting(debugger: Debugger) -> str:
    """What stands before the debugger, and how to begin."""
    at, name = debugger.position, model_name(debugger.session)
    prompts = [len(debugger.timeline.prompt(seq)) for seq in debugger.session.meta.sequences]
    tokens = " and ".join(plural(count, "prompt token") for count in prompts[:3]) + " …" * (len(prompts) > 3)
    last = debugger.timeline.last(at.branch)
    state = "live" if debugger.live else f"a replay of {plural(last + 1, 'step')}"
    begin = (
        ""
        if at.step >= 0
        else " `next` runs the prefill;"
        if debugger.live
        else " `next` goes to the first step;"
    )
    return f"{name}, tp={debugger.timeline.ranks}, {tokens}, {state}.{begin} `help` lists the commands."


def _block(asking: PromptSession[str], first: str) -> str:
    """The lines of `commands` up to `end`."""
    lines = [first]
    while lines[-1] != "end":
        lines.append(asking.prompt("> ").strip())
    return "\n".join(lines)


def _repeats(line: str) -> bool:
    try:
        return registry.find(line.split(maxsplit=1)[0]).group in _REPEATED
    except CommandError:
        return False


class DebuggerCompleter(Completer):
    """Completes command words, and then what the command's arguments are."""

    def __init__(self, debugger: Debugger) -> None:
        self.debugger = debugger

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """prompt_toolkit's question."""
        yield from (
            Completion(word, -len(typed), display_meta=meta)
            for typed, word, meta in completions(self.debugger, document.text_before_cursor)
        )


def completions(debugger: Debugger, line: str) -> Iterator[tuple[str, str, str]]:
    """(what was typed of it, the word, what it means) of everything that the line's last word may become."""
    words = line.lstrip().split(" ")
    typed = words[-1]
    if len(words) == 1:
        for one in registry.commands().values():
            if one.name.startswith(typed):
                yield typed, one.name, one.help
        return
    try:
        spec = registry.find(words[0])
    except CommandError:
        return
    for word, meta in _arguments(debugger, spec, words[1:-1]):
        if word.startswith(typed):
            yield typed, word, meta


def _arguments(debugger: Debugger, spec: registry.Command, before: list[str]) -> Iterable[tuple[str, str]]:
    plain = [argument for argument in spec.arguments if argument.kind != "flag"]
    flags = [a for a in spec.arguments if a.kind == "flag"]
    for flag in flags:
        yield f"--{flag.name.replace('_', '-')}", flag.help
    if not plain:
        return
    argument = plain[min(len(before), len(plain) - 1)]
    if spec.name == "toggle" and len(before) == 1:
        yield from _values(before[0])
    elif argument.choices:
        yield from ((choice, "") for choice in argument.choices)
    elif argument.kind == "fault":
        yield from ((rule, f"correct: {value}") for rule, value in DEFAULTS.items())
    elif argument.kind == "branch":
        yield from ((str(line.id), line.name) for line in debugger.timeline.lines.values())
    elif argument.kind == "breakpoint":
        yield from ((str(one.id), one.describe()) for one in debugger.breakpoints)
    elif spec.name == "help":
        yield from ((one.name, one.help) for one in registry.commands().values())
    elif argument.kind in ("tap", "location", "text"):
        yield from ((name, "") for name in debugger.timeline.places.names)


def _values(rule: str) -> Iterable[tuple[str, str]]:
    if rule in DEFAULTS:
        yield DEFAULTS[rule], "correct"
    yield from ((fault.value, fault.title) for fault in FAULTS if fault.seam == rule)
