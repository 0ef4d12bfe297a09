"""`lockstep weights`: what an engine has really loaded, rank by rank, against the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.workbench.cli import options
from lockstep.workbench.cli.attach_options import EngineName
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.export.json import dumps
from lockstep.workbench.library.loading_weights import weights

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command("weights")
def weights_command(
    command: Annotated[
        list[str], typer.Argument(metavar="CMD", help="The engine's own command.", show_default=False)
    ],
    model: Annotated[
        str,
        typer.Option("--model", metavar="MODEL", help="The checkpoint that it loads.", show_default=False),
    ],
    engine: EngineName = "auto",
    adapter: Annotated[
        Path | None,
        typer.Option(
            "--adapter",
            metavar="DIR",
            help="A LoRA adapter, as PEFT saves it, that is to be in force: merged, or beside the weights.",
            show_default=False,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Hold the weights in the memory of every rank of an engine against the checkpoint, before anything is computed.

    CMD runs until its ranks have loaded their weights, and is then ended. Every parameter is compared bit by bit, taken
    out of the tensors in which engines stack them and cut as each rank has it: what was never loaded, left as
    initialised, swapped, another rank's part, in another order, scaled, rounded or merged is named. With --adapter its
    targets are compared by their effective weights: an adapter that is not in force, counts twice or by another scale.

    Exit code: 1 where a weight is not the checkpoint's; 6 where not all could be compared; 3: no rank wrote anything.
    """
    with Status() as status:
        found = weights(command, model=model, engine=engine, adapter=adapter, progress=status)
    print(dumps(found.to_json()) if as_json else found)
    raise typer.Exit(Exit.OK if found else Exit.DIVERGED if found.wrong else Exit.INCONCLUSIVE)
