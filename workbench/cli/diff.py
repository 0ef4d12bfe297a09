"""`lockstep diff`: two sessions, tap by tap."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.workbench.cli import options
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.export.json import dumps
from lockstep.workbench.library import comparing

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
    found = comparing.diff(a, b, branch_a=branch_a, branch_b=branch_b, bitwise=bitwise)
    print(dumps(found.to_json()) if as_json else found)
    codes = {"match": Exit.OK, "diverged": Exit.DIVERGED, "inconclusive": Exit.INCONCLUSIVE}
    raise typer.Exit(codes[found.verdict])
