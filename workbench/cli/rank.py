"""`lockstep rank`: one rank of a host elsewhere, as torchrun starts it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from lockstep.engine.ranks.environment import rank_environment
from lockstep.engine.ranks.joining import address_of
from lockstep.workbench.cli import ending

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def rank(
    host: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Where the host listens.", show_default=False)
    ],
) -> None:
    """Be one rank of a host that was started with --listen.

    On each machine: torchrun … --no-python lockstep rank HOST:PORT. Both sides hold the same secret in LOCKSTEP_KEY.
    """
    address_of(host)
    ending.at_once(f"rank {os.environ.get('RANK', '?')}")
    here = rank_environment(host)
    # Imported here: torch takes seconds, which a wrong address need not wait for.
    from lockstep.engine.faults.resolve import resolve
    from lockstep.engine.ranks.worker import run

    run(here, resolve)
