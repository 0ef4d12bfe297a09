"""`lockstep mcp`: the debugger as tools for agents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.engine.extras import need

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def mcp(
    roots: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="ROOT",
            help="Directories and files that the agent may open, and write exports to; none: the demo and the gallery.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve agents on stdin and stdout: open, where, step, show, compare, diagnose, branch, export (needs the extra
    `mcp`).

    It is started by the agent's program, as in: claude mcp add lockstep -- lockstep mcp ./recordings ./my-checkpoint
    """
    need("mcp", "serving agents")
    # Imported here: the SDK takes a second, and is not there without the extra.
    from lockstep.workbench.mcp.server import AgentServer

    AgentServer(roots or ()).serve()
