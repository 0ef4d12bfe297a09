"""`lockstep run`: the debugger on a model, at a prompt or by script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.engine.run.sampling import Sampling
from lockstep.sessions.errors import RecordingLost
from lockstep.workbench.cli import options
from lockstep.workbench.cli.conversation import commands_of, converse, piped_commands
from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.debugger.host.launch import start
from lockstep.workbench.debugger.host.options import Launch, target_of
from lockstep.workbench.exit_codes import Exit

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

Script = Annotated[
    list[Path] | None,
    typer.Option(
        "--script", "-x", metavar="FILE", help="Commands to carry out, one a line.", show_default=False
    ),
]
Commands = Annotated[
    list[str] | None,
    typer.Option(
        "--ex", metavar="CMD", help="One command, after the scripts; repeatable.", show_default=False
    ),
]
LimitSeconds = Annotated[
    float | None,
    typer.Option(
        "--limit-seconds",
        metavar="S",
        min=0.1,
        max=1e9,
        help="Seconds for all commands; then exit 4.",
        show_default=False,
    ),
]
Batch = Annotated[bool, typer.Option("--batch", help="No prompt afterwards, even at a terminal.")]
JsonLines = Annotated[bool, typer.Option("--json", help="JSON Lines on stdout, an object an answer.")]


@app.command()
def run(
    model: options.Model,
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
    seed: Annotated[int, typer.Option("--seed")] = 0,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k")] = 0,
    top_p: Annotated[float, typer.Option("--top-p")] = 1.0,
    listen: options.Listen = "",
    timeout: options.Timeout = 60.0,
    start_timeout: options.StartTimeout = 300.0,
    script: Script = None,
    ex: Commands = None,
    batch: Batch = False,
    as_json: JsonLines = False,
    limit_seconds: LimitSeconds = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE.session", help="Where to record; default: the data directory."),
    ] = None,
    capture: Annotated[
        list[str] | None,
        typer.Option(
            "--capture", metavar="WHAT", help="stats, last, full, off, or globs of taps to keep whole."
        ),
    ] = None,
) -> None:
    """Debug a model: step, break, look, go back, change, check. Everything is recorded.

    Without a terminal, commands are read from standard input. `help` at the prompt lists them.
    """
    lines = commands_of(script or (), ex or ())
    if not lines and not sys.stdin.isatty():
        lines = piped_commands()
    launch = Launch(
        model, prompt or (), ids or (), chat, tp, device, dtype, fault or (), capture or (),
        Sampling(temperature, top_k, top_p, seed), timeout, save, listen,
        start_timeout=start_timeout, weights=weights, chunk=chunk, ep=ep,
    )  # fmt: skip
    lost = ""
    try:
        with start(target_of(launch), _warn) as debugger:
            code = converse(debugger, lines, batch=batch, as_json=as_json, limit=limit_seconds)
            saved = debugger.session.path
    except RecordingLost as error:
        lost = f" in part: {error}"
        code = code or (Exit.OK if save is None else Exit.NOT_SAVED)
    report_line(f"recorded in {saved}{lost}")
    raise typer.Exit(code)


def _warn(message: str) -> None:
    report_line(f"warning: {message}")
