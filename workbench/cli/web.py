"""`lockstep web`: the screens in a browser of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.engine.extras import need
from lockstep.workbench.tui.web import serve

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def web(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|SESSION", help="What to open; default: the home screen.", show_default=False
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8000,
    visitors: Annotated[
        int, typer.Option("--visitors", metavar="N", min=1, help="How many may be in at a time.")
    ] = 4,
) -> None:
    """Serve the screens to browsers of this machine (needs the extra `web`). The address on stdout lets in."""
    need("web", "serving browsers")
    raise typer.Exit(serve([] if target is None else [target], port, visitors))
