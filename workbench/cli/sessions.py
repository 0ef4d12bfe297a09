"""`lockstep sessions`: the recordings on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.sessions import Session, SessionError, clean
from lockstep.sessions.compact import Packed, compact
from lockstep.sessions.copy import copy
from lockstep.sessions.format.files import log_bytes
from lockstep.sessions.lock import holder
from lockstep.sessions.remove import remove
from lockstep.sessions.salvage import salvage
from lockstep.sessions.state import STATE_WORDS, foreign_log, state_of
from lockstep.sessions.verify import verify
from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.debugger.answers import TableResult
from lockstep.workbench.exit_codes import Exit, UsageError
from lockstep.workbench.export.json import dumps
from lockstep.workbench.inferior.destination import may_write
from lockstep.workbench.paths import data_directory, find_session, gallery_names, saved_sessions
from lockstep.workbench.settings import session_limits
from lockstep.workbench.views.branches import engine_name
from lockstep.workbench.views.identity import model_name

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
Named = Annotated[list[Path], typer.Argument(metavar="SESSION", help="Files, or names as `list` shows them.")]


@app.callback(invoke_without_command=True)
def sessions(context: typer.Context, as_json: Json = False) -> None:
    """List, show, verify, copy, pack or remove saved sessions."""
    if context.invoked_subcommand is None:
        list_sessions(as_json)
    elif as_json:
        raise UsageError(f"put --json behind {context.invoked_subcommand}")


@app.command("list")
def list_sessions(as_json: Json = False) -> None:
    """The sessions in the data directory, newest first."""
    rows = [_row(path, found) for path, found in saved_sessions().items()]
    rows = [row for row in rows if row]  # some vanish meanwhile
    if as_json:
        print(dumps([dict(zip(_COLUMNS, row, strict=True)) for row in rows]))
    else:
        for row in rows:
            row[1] = STATE_WORDS.get(row[1], row[1])
        empty = f"no sessions in {data_directory() / 'sessions'}"
        print(TableResult("", _COLUMNS, rows, empty=empty).to_text())
        if not rows:
            report_line(f"note: with the package come {', '.join(gallery_names())}")


@app.command()
def show(session: Named, as_json: Json = False) -> None:
    """What sessions hold: model, faults, branches, notes, what was judged."""
    for name in session:
        with Session.open(find_session(name), session_limits()) as opened, opened.view():
            reported = _describe(opened)
        print(dumps(reported) if as_json else _text(reported))


@app.command("verify")
def verify_sessions(session: Named, as_json: Json = False) -> None:
    """Check the integrity of sessions: structure, references, every blob. Exit 1 when one is damaged or incomplete."""
    found = {str(path): verify(path, session_limits()) for path in map(find_session, session)}
    if as_json:
        print(dumps(found))
    else:
        for path, problems in found.items():
            reported = "; ".join(problems) or _ok(Path(path))
            print(clean(reported if path in reported else f"{path}: {reported}"))
    if any(found.values()):
        raise typer.Exit(Exit.DIVERGED)


@app.command("copy")
def copy_session(
    session: Annotated[Path, typer.Argument(metavar="SESSION", help="A file, or a name as `list` shows it.")],
    target: Annotated[Path, typer.Argument(metavar="FILE.session", help="Where the copy goes.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a session that is there.")] = False,
    rescue: Annotated[
        bool,
        typer.Option("--salvage", help="Of a session whose newest steps are lost, copy what can be read."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Copy a session whole, even while it is being recorded (`cp` would leave its newest steps behind)."""
    source, missing = find_session(session), ""
    if force:
        may_write(target)
    if rescue:
        missing = salvage(source, target, overwrite=force)
    else:
        copy(source, target, overwrite=force)
    size = _size(target, target.lstat())
    reported = f"copied to {target}: {size} bytes" + (f". The original is {missing}" if missing else "")
    print(dumps({"copy": str(target), "bytes": size, "missing": missing}) if as_json else clean(reported))


@app.command("pack")
def pack_sessions(session: Named, as_json: Json = False) -> None:
    """Make each session one file as small as it can be (a killed run leaves a log beside it)."""
    for path in map(find_session, session):
        packed = compact(path)
        print(
            dumps({"path": str(path), **asdict(packed)})
            if as_json
            else clean(f"{path}: {_packed_text(packed)}")
        )


@app.command()
def rm(
    session: Named,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove sessions. Files that are none are refused."""
    for path in map(find_session, session):
        Session.open(path, session_limits()).close()
        if not yes and not _agreed(path):
            continue
        remove(path)
        print(dumps({"removed": str(path)}) if as_json else clean(f"removed {path}"))


_UNPROTECTED = "not protected: rows of this format have no checksums (`lockstep sessions pack` converts it)"
_COLUMNS = ["name", "state", "model", "tp", "faults", "branches", "steps", "bytes", "when"]


def _row(path: Path, found: os.stat_result) -> list[Any]:
    """A line of the list; an empty one of what is not there any more."""
    when = datetime.fromtimestamp(found.st_mtime).strftime("%Y-%m-%d %H:%M")
    try:
        with Session.open(path, session_limits()) as opened, opened.view():
            reported = _describe(opened)
    except (SessionError, OSError) as error:
        if not os.path.lexists(path):
            return []
        why = str(error).removeprefix(f"{path} ").replace(f" {path}", "")  # what it is, in few words
        return [path.stem, "unreadable", clean(why, limit=60), *[None] * 4, _size(path, found), when]
    steps = sum(branch["steps"] - branch["fork_step"] for branch in reported["branches"])
    return [
        path.stem,
        reported["state"],
        reported["model"],
        reported["tp"],
        _rules(reported["faults"], reported["engine"]),
        len(reported["branches"]),
        steps,
        _size(path, found),
        when,
    ]


def _describe(session: Session) -> dict[str, Any]:
    meta = session.meta
    verdicts: dict[str, int] = {}
    for one in session.verdicts():
        verdicts[one.verdict] = verdicts.get(one.verdict, 0) + 1
    return {
        "path": str(session.path),
        "model": model_name(session),
        "engine": engine_name(session),
        "dtype": clean(meta.config.dtype or "?"),
        "tp": session.ranks,
        "faults": {clean(name): clean(value) for name, value in meta.rules.items()},
        "taps": len(session.taps),
        "state": state_of(session),
        "losses": session.losses,
        "foreign_log": foreign_log(session) or None,
        "protected": session.protected,
        "branches": [
            {"id": b.id, "name": clean(b.name), "parent": b.parent, "fork_step": b.fork_step,
             "steps": session.steps(b.id).stop, "faults": dict(b.rules)}
            for b in session.branches()
        ],
        "verdicts": verdicts,
        "notes": [clean(event.text) for event in session.events(kind="note")],
        "commands": len(session.events(kind="command")),
        "bytes": _size(session.path, session.path.lstat()),
    }  # fmt: skip


def _rules(faults: Mapping[str, str], engine: str) -> str:
    """The faults that are switched on; of another engine's run nothing is known of them but where it is from."""
    switched_on = clean(" ".join(f"{name}={value}" for name, value in faults.items()), limit=200)
    return switched_on or (f"recorded from {engine}" if engine else "none")


def _text(facts: dict[str, Any]) -> str:
    origin = _rules({}, facts["engine"]) if facts["engine"] else f"faults {_rules(facts['faults'], '')}"
    rows = [
        [b["id"], clean(b["name"], limit=60), b["parent"], b["fork_step"], b["steps"],
         _rules(b["faults"], facts["engine"])]
        for b in facts["branches"]
    ]  # fmt: skip
    table = TableResult("", ["branch", "name", "parent", "fork", "steps", "faults"], rows)
    verdicts = (
        ", ".join(f"{count} {clean(verdict, limit=40)}" for verdict, count in facts["verdicts"].items())
        or "none"
    )
    return "\n".join([
        f"{clean(facts['path'])}: {facts['model']}, tp {facts['tp']}, {facts['dtype']}, {facts['bytes']} bytes",
        f"{origin}; {facts['taps']} taps; {facts['commands']} commands; verdicts: {verdicts}",
        f"state: {STATE_WORDS[facts['state']]}{'' if facts['protected'] else f'; {_UNPROTECTED}'}",
        *(clean(loss) for loss in facts["losses"]),
        *([f"note: {clean(facts['foreign_log'])}"] if facts["foreign_log"] and not facts["losses"] else []),
        *(f"note: {note}" for note in facts["notes"]),
        table.to_text(),
    ])  # fmt: skip


def _ok(path: Path) -> str:
    """What was proved: of a session that was not closed, only what is there so far."""
    with Session.open(path, session_limits()) as session:
        state, rest = state_of(session), "" if session.protected else f"; {_UNPROTECTED}"
        if foreign := foreign_log(session):
            rest += f"; {foreign}"
    if state == "recording":
        return f"ok so far: it is being recorded by {holder(path)}{rest}"
    if state == "interrupted":
        return f"ok up to the last commit: its writer did not close it{rest}"
    return f"ok{rest}"


def _packed_text(packed: Packed) -> str:
    other = "; the log of another session was set aside"
    rest = f"{other} as {packed.set_aside}" if packed.set_aside else ""
    if packed.converted:
        return f"converted to the present format, {packed.before} → {packed.after} bytes{rest}"
    if packed.after < packed.before:
        return f"{packed.before} → {packed.after} bytes{rest}"
    return f"left as it is, {packed.after} bytes: packed it would not be smaller{rest}"


def _size(path: Path, found: os.stat_result) -> int:
    return found.st_size + log_bytes(path)


def _agreed(path: Path) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("not a terminal: give --yes to remove sessions")
    return typer.confirm(f"remove {clean(str(path))}?")
