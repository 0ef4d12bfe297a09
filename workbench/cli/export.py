"""`lockstep export`: a session as a page, a picture, a table, a document, a test report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, TextIO

import typer

from lockstep.engine.scratch import ScratchFolder, deliver
from lockstep.engine.text import bytes_text
from lockstep.sessions import Session
from lockstep.sessions.text import clean
from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.export.added import exporters, write_added
from lockstep.workbench.export.kinds import KINDS
from lockstep.workbench.export.session_files import Content, NothingToExport, SessionFiles
from lockstep.workbench.extensions import Extension
from lockstep.workbench.paths import find_session
from lockstep.workbench.settings import session_limits
from lockstep.workbench.views.request import Request
from lockstep.workbench.views.statistics import select

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

_SQLITE = b"SQLite format 3\0"


@app.command()
def export(
    session: Annotated[
        Path,
        typer.Argument(
            metavar="SESSION", help="A file, or a name as `lockstep sessions` shows it.", show_default=False
        ),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="A page that needs no network.")
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg", metavar="FILE", help="The figure asked for: --attention, --tap, else error over depth."
        ),
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="The same figure as pixels.")
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Statistics by step, tap and rank.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="What the page shows, as JSON.")
    ] = None,
    junit_file: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="The verdicts, a test a tap.")
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="NAME=FILE",
            help="What a package adds, by its name; repeatable.",
            show_default=False,
        ),
    ] = None,
    tap: Annotated[
        list[str] | None,
        typer.Option("--tap", metavar="GLOB", help="Taps whose statistics to export; repeatable."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", min=0, help="Default: where the trouble is, or the last."),
    ] = None,
    branch: Annotated[
        str | None,
        typer.Option("--branch", metavar="NAME", help="By name or number. Default: the wrong one."),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option("--attention", metavar="LAYER[:HEAD]", help="Draw these heads; repeatable."),
    ] = None,
    biases: Annotated[
        list[int] | None,
        typer.Option("--biases", metavar="LAYER", help="Show this layer's biases; repeatable."),
    ] = None,
) -> None:
    """Write a session as files for others: a bug report, a spreadsheet, a CI.

    FILE `-` is stdout. What was left out to keep a page small is reported, in it and on stderr.
    """
    session = find_session(session)
    files = (html, svg, png, csv_file, json_file, junit_file)
    targets = {f"--{kind}": path for kind, path in zip(KINDS, files, strict=True)}
    added = _added(to or ())
    _check_targets(targets | {f"--to {by.name}": path for by, path in added}, session)
    with Session.open(session, session_limits()) as opened, opened.walk():
        request = Request(
            branch=_branch(opened, branch),
            step=step,
            taps=tuple(tap or ()),
            attention=tuple(map(_head, attention or ())),
            biases=tuple(biases or ()),
        )
        select(opened, request.taps)
        written = SessionFiles(opened, request)
        for option, path in targets.items():
            if path is not None:
                try:
                    content = written.content(option.removeprefix("--"))
                except NothingToExport as problem:
                    raise UsageError(f"{option}: {problem}") from None
                _write(path, content)
        for by, path in added:
            try:
                _put_in_place(path, partial(write_added, by, opened, request=request))
            except NothingToExport as problem:
                raise UsageError(f"--to {by.name}: {problem}") from None
        cut = written.story.cut if html or json_file else opened.losses
    for words in cut:
        report_line(f"left out: {words}")


def _check_targets(targets: dict[str, Path | None], session: Path) -> None:
    """UsageError before any work is done for nothing, or over a session."""
    chosen = {option: path for option, path in targets.items() if path is not None}
    if not chosen:
        raise UsageError(
            f"name what to write: {', '.join(f'{option} FILE' for option in targets)}, --to NAME=FILE"
        )
    if len(set(chosen.values())) < len(chosen):
        raise UsageError(f"{' and '.join(chosen)} name the same file: give each its own")
    for option, path in chosen.items():
        if str(path) == "-":
            continue
        if path.is_dir() or not path.parent.is_dir():
            wrong = "is a directory" if path.is_dir() else "is in no directory that exists"
            raise UsageError(f"{option} {clean(str(path))} {wrong}: name a file in an existing one")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise UsageError(f"{option} {clean(str(path))}: you may not write to its directory: name another")
        if path.exists() and (path.samefile(session) if session.exists() else False):
            raise UsageError(f"{option} {clean(str(path))} is the session itself: choose another name")
        if path.is_file() and _head_of(path) == _SQLITE:
            raise UsageError(f"{option} {clean(str(path))} holds a session: choose another name")


def _added(words: Sequence[str]) -> list[tuple[Extension, Path]]:
    """What NAME=FILE ask for. UsageError for a name that no package adds."""
    known = exporters() if words else {}
    found = []
    for word in words:
        name, equals, file = word.partition("=")
        if not equals or file in ("", "-"):
            raise UsageError(f"--to takes NAME=FILE, not {clean(word, limit=80)!r}")
        if name not in known:
            names = ", ".join(known) or "no package adds any"
            raise UsageError(f"--to {clean(name, limit=40)}: no such exporter; there is: {names}")
        found.append((known[name], Path(file)))
    return found


def _head_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_SQLITE))


def _branch(session: Session, word: str | None) -> int | None:
    """A branch by its name, else by its number."""
    if word is None:
        return None
    branches = session.branches()
    for line in branches:
        if word in (line.name, str(line.id)):
            return line.id
    known = ", ".join(clean(line.name, limit=40) for line in branches[:12])
    raise UsageError(f"--branch {clean(word, limit=40)}: the session has {known}")


def _head(word: str) -> tuple[int, int | None]:
    layer, colon, head = word.partition(":")
    if not layer.isdecimal() or (colon and not head.isdecimal()):
        raise UsageError(
            f"--attention takes LAYER or LAYER:HEAD, such as 3 or 3:5, not {clean(word, limit=40)!r}"
        )
    return int(layer), int(head) if colon else None


def _write(path: Path, content: Content) -> None:
    """Whole or not at all: the file appears when it is complete."""
    if str(path) == "-":
        if isinstance(content, bytes):
            sys.stdout.buffer.write(content)
        else:
            _put(sys.stdout, content)
        return
    _put_in_place(path, lambda fresh: _into(fresh, content))


def _put_in_place(path: Path, write: Callable[[Path], None]) -> None:
    try:
        with ScratchFolder.make("export", path.parent) as folder:
            fresh = folder.path / path.name
            write(fresh)
            deliver(fresh, path)
    except OSError as error:
        raise OSError(
            f"cannot write {path}: {error.strerror or error}. What was there is unchanged."
        ) from error
    report_line(f"wrote {path} ({bytes_text(path.stat().st_size)})")


def _into(fresh: Path, content: Content) -> None:
    if isinstance(content, bytes):
        fresh.write_bytes(content)
    else:
        with fresh.open("w", encoding="utf-8", newline="") as out:
            _put(out, content)


def _put(out: TextIO, content: str | Callable[[TextIO], None]) -> None:
    if isinstance(content, str):
        out.write(content)
    else:
        content(out)
