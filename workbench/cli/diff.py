"""`lockstep diff`: two sessions, tap by tap."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.sessions import Session
from lockstep.workbench.cli import options
from lockstep.workbench.debugger.commands.diff import compare_sessions
from lockstep.workbench.debugger.commands.judged_diff import golden_of, judged_diff
from lockstep.workbench.debugger.commands.row_diff import row_diff
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.export.json import dumps
from lockstep.workbench.paths import find_session
from lockstep.workbench.settings import session_limits

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A.session")],
    b: Annotated[Path, typer.Argument(metavar="B.session")],
    branch_a: Annotated[int, typer.Option("--branch-a", metavar="N", help="Branch of A.")] = 0,
    branch_b: Annotated[int, typer.Option("--branch-b", metavar="N", help="Branch of B.")] = 0,
    bitwise: Annotated[
        bool,
        typer.Option(
            "--bitwise", help="Bit by bit, unjudged, even where one of the two is a golden reference."
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Which taps differ between two sessions, and the first operation that has equal inputs and an unequal output.

    Rows are matched by sequence and position over the tokens that both read, whatever the passes and the number of
    ranks. Where one of the two is a golden reference, each tap of the other is judged against its noise. Exit 1 if any
    differs, or is wrong; 6 where recordings do not carry a verdict, as where their rows are not proved to be the same.
    """
    limits = session_limits()
    with (
        Session.open(find_session(a), limits) as first,
        Session.open(find_session(b), limits) as second,
        first.walk(second),
    ):
        golden = None if bitwise else golden_of(first, second)
        if golden is not None:
            engine, branch = (first, branch_a) if golden is second else (second, branch_b)
            found = judged_diff(engine, branch, golden)
        elif (rows := row_diff(first, branch_a, second, branch_b)) is not None:
            found = rows
        else:
            found = compare_sessions(first, branch_a, second, branch_b)
    print(dumps(found.to_json()) if as_json else found.to_text())
    codes = {"match": Exit.OK, "diverged": Exit.DIVERGED, "inconclusive": Exit.INCONCLUSIVE}
    raise typer.Exit(codes[found.verdict])
