"""The debugger's `export` command."""

from __future__ import annotations

from pathlib import Path

from lockstep.workbench.debugger.answers import Message, Result
from lockstep.workbench.debugger.commands.script import journal_of, script_of
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.registry import Argument, command
from lockstep.workbench.debugger.errors import CommandError, DebuggerError
from lockstep.workbench.export.kinds import KINDS


@command(
    "export", arguments=(
        Argument("what", "word", required=True, choices=("script", "journal", *KINDS)),
        Argument("file", "file", help="none: shown; an existing file is never replaced"),
    ),
    group="session", help="the session as a script or journal, or as `lockstep export` writes it",
    details="`export script FILE` does the same again, `export journal FILE` has every event as a line of JSON;"
    " `export html FILE` and the others are what `lockstep export` writes, of this branch at this step.",
)  # fmt: skip
def export(debugger: Debugger, what: str, file: str | None) -> Result:
    """Write down what was done, or what there is."""
    content = _content(debugger, what)
    if file is None:
        if isinstance(content, bytes):
            raise CommandError(f"export {what} FILE: a picture needs a file")
        return Message(content.rstrip("\n"), {"lines": content.rstrip("\n").count("\n") + 1})
    path = _writable(debugger, file)
    try:
        with path.open("xb") as opened:
            opened.write(content if isinstance(content, bytes) else content.encode())
    except FileExistsError:
        raise DebuggerError(f"{path} exists: choose another name") from None
    except OSError as error:
        raise DebuggerError(f"{path}: {error.strerror}") from error
    return Message(f"wrote {path}", {"path": str(path)})


def _content(debugger: Debugger, what: str) -> str | bytes:
    if what in ("script", "journal"):
        return (script_of(debugger) if what == "script" else journal_of(debugger)) + "\n"
    # Not at the top: most sessions are driven without, and a page takes its templates with it.
    from lockstep.workbench.export.session_files import SessionFiles
    from lockstep.workbench.views.request import Request

    debugger.session.refresh()
    at = debugger.position
    step = min(at.step, debugger.timeline.last(at.branch))
    try:
        return SessionFiles(
            debugger.session, Request(branch=at.branch, step=None if step < 0 else step)
        ).text(what)
    except ValueError as problem:  # NothingToExport, or a machine without fonts
        raise DebuggerError(f"export {what}: {problem}") from problem


def _writable(debugger: Debugger, file: str) -> Path:
    """A script may write new files below the working directory, and nothing else."""
    path = Path(file)
    if debugger.settings.in_script and (path.is_absolute() or ".." in path.parts or path.parent.is_symlink()):
        raise DebuggerError(f"a script may only export to new files in the working directory, not to {path}")
    return path
