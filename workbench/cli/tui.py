"""`lockstep tui`: the screens, straight on a model or a session."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.workbench.cli import options
from lockstep.workbench.cli.screens import open_session
from lockstep.workbench.cli.terminal import no_screens, shown_meanwhile
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.paths import session_of

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def tui(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|SESSION",
            help="A model, `demo`, or a saved session: a file, or a name as `lockstep sessions` shows it.",
            show_default=False,
        ),
    ],
    prompt: options.Prompts = None,
    ids: options.Ids = None,
    chat: options.Chat = False,
    tp: options.Tp = 1,
    ep: options.Ep = 1,
    device: options.Device = "cpu",
    dtype: options.DType = "auto",
    weights: options.Weights = "dequantised",
    chunk: options.Chunk = None,
    fault: options.Faults = None,
    listen: options.Listen = "",
    seed: Annotated[int, typer.Option("--seed")] = 0,
    capture: Annotated[
        list[str] | None,
        typer.Option(
            "--capture", metavar="WHAT", help="stats, last, full, off, or globs of taps.", show_default=False
        ),
    ] = None,
    save: options.Save = None,
    timeout: Annotated[float | None, options.TIMEOUT] = None,
    start_timeout: Annotated[float | None, options.START_TIMEOUT] = None,
) -> None:
    """Step, inspect, toggle and compare on screen; live on a model, or replayed from a session. `lockstep tui` alone is
    the home screen."""
    if why := no_screens():
        raise UsageError(f"{why}: use `lockstep run` or `lockstep replay` instead")
    if (path := session_of(target)) is not None:
        raise typer.Exit(open_session(path))
    with shown_meanwhile(f"lockstep: opening {target} …"):
        # Imported here: textual is not for those who only ask for help.
        from lockstep.workbench.tui.launch import run_model

    code = run_model(
        target, tp=tp, ep=ep, prompts=prompt or (), ids=ids or (), chat=chat, device=device, dtype=dtype,
        weights=weights, rules=fault or (), capture=capture or (), seed=seed, session=save, listen=listen,
        timeout=timeout, start_timeout=start_timeout, chunk=chunk,
    )  # fmt: skip
    raise typer.Exit(code)
