"""`lockstep attach`: run somebody else's engine with a tap on every rank, and keep what it computed as a session."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lockstep.workbench.cli import options
from lockstep.workbench.cli.attach_options import EngineName, Only, Passes
from lockstep.workbench.cli.check import code_of
from lockstep.workbench.cli.import_dump import report_rest
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.export.diagnosis_text import render_diagnosis
from lockstep.workbench.export.json import dumps
from lockstep.workbench.library import attached
from lockstep.workbench.library.attach_passes import AttachedRuns

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command("attach")
def attach_to(
    command: Annotated[
        list[str], typer.Argument(metavar="CMD", help="The engine's own command.", show_default=False)
    ],
    output: options.Output = None,
    engine: EngineName = "auto",
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="Its checkpoint: then the recording is judged, and its bugs are named.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Run CMD once, with all tensors. Else with --model it is run for statistics, and again for the "
            "tensors around the first place where these leave the reference.",
        ),
    ] = False,
    compare_text: Annotated[
        bool,
        typer.Option(
            "--compare-text",
            help="Run CMD without the tap first, as it starts, and report whether its tokens are the recorded ones.",
        ),
    ] = False,
    only: Only = None,
    steps: Passes = None,
    capture: Annotated[
        str | None,
        typer.Option(
            "--capture", metavar="full|stats", help="One run, with tensors, or of each row statistics and a hash.",
            show_default=False,
        ),
    ] = None,
    keep_dump: Annotated[
        Path | None,
        typer.Option("--keep-dump", metavar="DIR", help="Keep what the ranks wrote there.", show_default=False),
    ] = None,
    as_json: options.Json = False,
) -> None:  # fmt: skip
    """Run an engine's own command, tap every rank of it, and make a session of what it computed.

    vLLM, SGLang, nano-vllm and transformers are found in whatever process they run, without a change to them; what is
    set in the engine for that (eager mode; of SGLang no prefix cache) is reported. An engine that dies leaves what it
    did.

    Exit code: the command's own where it is not 0; 6 in place of its 1. 3: no rank wrote anything. With --model as of
    `diagnose`: 1 where something is wrong, 6 where the recording does not suffice, as where the runs of CMD generate
    different texts.
    """
    with Status() as status:
        runs = attached.attach(
            command, model=model, output=output, engine=engine, once=once, compare_text=compare_text, only=only,
            steps=steps, capture=capture, keep_dump=keep_dump, progress=status,
        )  # fmt: skip
    _report(runs, as_json)
    raise typer.Exit(_code(runs))


def _code(runs: AttachedRuns) -> int:
    """The command's own exit code where that is not 0. But 1 is what a divergence ends with, and nothing else."""
    judged = Exit.OK if runs.result is None else code_of(runs.result.event)
    own = runs.exit_code
    if own == Exit.DIVERGED:
        return judged or Exit.INCONCLUSIVE
    return own or judged or (Exit.INCONCLUSIVE if runs.other_text else Exit.OK)


def _report(runs: AttachedRuns, as_json: bool) -> None:
    """What came of it: for people on stderr, as stdout is the command's."""
    imported, result, changed = runs.imported, runs.result, runs.attached.changed
    if as_json:
        print(dumps(runs.to_json()))
        return
    if result is None:
        report_line(imported.coverage.in_words())
        report_line("one run, not judged: there is no --model to hold it against")
    report_rest(imported)
    if runs.text:
        report_line(runs.text)
    elif changed:
        report_line("whether the command generates the same without the tap was not tried (--compare-text)")
    if result is not None:
        render_diagnosis(result.event, Console(highlight=False, soft_wrap=True, stderr=True))
