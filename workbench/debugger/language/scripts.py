"""Scripts: files of commands, one a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.workbench.debugger.answers import Result
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.errors import CommandError, RunEnded

#: A script longer than this is none.
_LARGEST_SCRIPT = 1 << 20


def read_script(path: Path) -> list[tuple[int, str]]:
    """A script's commands. CommandError when it cannot be read."""
    try:
        if path.stat().st_size > _LARGEST_SCRIPT:
            raise CommandError(f"{path}: larger than any script ({_LARGEST_SCRIPT} bytes)")
        return script_lines(path.read_text(encoding="utf-8"), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: cannot be read: {error}") from error


def run_script(
    debugger: Debugger, lines: Sequence[tuple[int, str]], name: str
) -> Iterator[tuple[int, Result]]:
    """Carry out a script's commands, (line number, result) each. CommandError names file and line."""
    for number, line in lines:
        try:
            yield number, debugger.execute(line)
        except CommandError as error:
            raise CommandError(f"{name}:{number}: {error}", error.line, error.caret) from error
        except RunEnded:
            return


def script_lines(text: str, name: str) -> list[tuple[int, str]]:
    """A script's commands with their line numbers. `#` begins a comment at the start of a line; the lines from
    `commands` to `end` are one command."""
    found: list[tuple[int, str]] = []
    block: tuple[int, list[str]] | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if block is not None:
            block[1].append(line)
            if line == "end":
                found.append((block[0], "\n".join(block[1])))
                block = None
        elif line.split()[0] == "commands":
            block = (number, [line])
        else:
            found.append((number, line))
    if block is not None:
        raise CommandError(f"{name}:{block[0]}: commands without end")
    return found
