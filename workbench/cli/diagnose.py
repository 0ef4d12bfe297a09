"""`lockstep diagnose`: what is wrong with a model on our engine, or with a recording of anybody's, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lockstep.sessions.text import clean
from lockstep.workbench.cli import options
from lockstep.workbench.cli.check import STARTING, code_of
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.diagnosis.search_time import SEARCH_SECONDS
from lockstep.workbench.export.diagnosis_text import render_diagnosis
from lockstep.workbench.export.json import dumps

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def diagnose(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|SESSION",
            help="A model to run on our engine; or a recording of anybody's: a file, or a name as `lockstep sessions` "
            "shows it.",
            show_default=False,
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="The checkpoint that the recording is of.", show_default=False
        ),
    ] = None,
    golden: Annotated[
        Path | None,
        typer.Option(
            "--golden",
            metavar="G.session",
            help="A reference of the same tokens, if there is one.",
            show_default=False,
        ),
    ] = None,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference/--no-reference",
            help="Of a recording: record a reference by transformers where none is given, or judge its operations on "
            "their own inputs alone.",
        ),
    ] = True,
    branch: Annotated[int, typer.Option("--branch", metavar="N", help="Of a recording: which branch.")] = 0,
    prompt: options.Prompts = None,
    ids: options.Ids = None,
    chat: options.Chat = False,
    prompt_tokens: options.PromptTokens = None,
    tp: options.Tp = 1,
    ep: options.Ep = 1,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=0, help="Of a model: decode steps after the prefill.")
    ] = 8,
    fault: options.Faults = None,
    device: options.Device = "cpu",
    dtype: options.DType = "auto",
    chunk: options.Chunk = None,
    search_seconds: Annotated[
        float,
        typer.Option(
            "--search-seconds",
            metavar="S",
            min=0.0,
            help="Of a recording: try no further hypothesis after that time; the verdict and what was found stand.",
        ),
    ] = SEARCH_SECONDS,
    reproduce: Annotated[
        bool | None,
        typer.Option(
            "--reproduce/--no-reproduce",
            help="Of a recording: put the causes into the reference, to see whether that gives the run's tensors and "
            "tokens; by default unless it takes longer than naming them.",
            show_default=False,
        ),
    ] = None,
    save: options.Save = None,
    timeout: options.Timeout = 60.0,
    start_timeout: options.StartTimeout = 300.0,
    as_json: options.Json = False,
) -> None:
    """Name what is wrong: operation, layers, ranks, heads, steps; what was computed instead; the fix.

    A model is run on our engine. What the evidence names is confirmed by switching rules off, and by runs that must not
    differ: on one rank, in chunks, in a batch. A recording needs its checkpoint alone: each operation is judged on the
    inputs that were recorded.

    Exit code 0: nothing is wrong. 1: something is, and the causes are named. 6: inconclusive.
    """
    with Status() as status:
        status.report(STARTING)
        from lockstep.workbench.library import judging  # seconds, on a slow machine

        found = judging.diagnose(
            target, model=model, golden=golden, reference=reference, branch=branch, prompt=prompt, ids=ids, chat=chat,
            prompt_tokens=prompt_tokens, tp=tp, ep=ep, steps=steps, faults=fault, device=device, dtype=dtype,
            chunk=chunk, save=save, timeout=timeout, start_timeout=start_timeout, search_seconds=search_seconds,
            reproduce=reproduce, progress=status,
        )  # fmt: skip
    if as_json:
        print(dumps(found.to_json()))
    else:
        if found.subject:
            print(clean(found.subject))
        render_diagnosis(found.event, Console(highlight=False, soft_wrap=True))
    raise typer.Exit(code_of(found.event))
