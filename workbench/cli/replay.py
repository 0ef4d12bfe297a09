"""`lockstep replay`: the debugger on a saved session; no model, no torch, no GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.sessions import Session
from lockstep.sessions.state import foreign_log
from lockstep.workbench.cli.conversation import commands_of, converse, piped_commands
from lockstep.workbench.cli.run import Batch, Commands, JsonLines, LimitSeconds, Script
from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.debugger.host import replay as replaying
from lockstep.workbench.debugger.host.replay import open_replay
from lockstep.workbench.exit_codes import Exit, UsageError
from lockstep.workbench.export.json import dumps
from lockstep.workbench.models.opening import open_to_run
from lockstep.workbench.paths import find_session
from lockstep.workbench.settings import session_limits

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def replay(
    session: Annotated[
        Path, typer.Argument(metavar="SESSION", help="A file, or a name as `lockstep sessions` shows it.")
    ],
    script: Script = None,
    ex: Commands = None,
    batch: Batch = False,
    as_json: JsonLines = False,
    limit_seconds: LimitSeconds = None,
    verify: Annotated[
        str | None,
        typer.Option(
            "--verify", metavar="MODEL", help="Run all of it again on MODEL and compare every checksum."
        ),
    ] = None,
) -> None:
    """Replay a session: the same commands as `lockstep run`, read from the recording.

    Of what was not captured, the command that would capture it is named.
    """
    session = find_session(session)
    if verify is not None:
        if script or ex:
            raise UsageError("--verify runs the whole session again and takes no commands")
        raise typer.Exit(_verify(session, verify, as_json))
    lines = commands_of(script or (), ex or ())
    if not lines and not sys.stdin.isatty():
        lines = piped_commands()
    with open_replay(session) as debugger:
        for loss in debugger.session.losses:
            report_line(f"warning: {session} is {loss}")
        if (foreign := foreign_log(debugger.session)) and not debugger.session.losses:
            report_line(f"note: {foreign}")
        code = converse(debugger, lines, batch=batch, as_json=as_json, limit=limit_seconds)
    raise typer.Exit(code)


def _verify(path: Path, model: str, as_json: bool) -> Exit:
    opened = open_to_run(model)
    with Session.open(path, session_limits()) as session:
        result = replaying.verify(
            session, opened.path, opened.config, on_warning=lambda text: report_line(f"warning: {text}")
        )
    print(dumps(result.to_json()) if as_json else result.to_text())
    return Exit.DIVERGED if result.divergences else Exit.OK
