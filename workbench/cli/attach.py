"""`lockstep attach`: run somebody else's engine with a tap on every rank, and keep what it computed as a session."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lockstep.engine.scratch import ScratchFolder
from lockstep.workbench.checking.verdicts import store_judgement, verdict_rows
from lockstep.workbench.cli import options
from lockstep.workbench.cli.attach_options import EngineName, Only, Passes, tap_request
from lockstep.workbench.cli.attach_passes import AttachedRuns, RepeatedCommand
from lockstep.workbench.cli.check import code_of
from lockstep.workbench.cli.terminal import tell
from lockstep.workbench.exit_codes import Exit, UsageError
from lockstep.workbench.export.diagnosis_text import render_diagnosis
from lockstep.workbench.export.json import dumps
from lockstep.workbench.inferior.destination import may_write
from lockstep.workbench.models.opening import open_to_run
from lockstep.workbench.paths import new_session_path

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
            help="Run CMD without the tap first, as it starts, and say whether its tokens are the recorded ones.",
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
    set in the engine for that (eager mode, no prefix cache) is told. An engine that dies leaves what it did.

    Exit code: the command's own where it is not 0; 6 in place of its 1. 3: no rank wrote anything. With --model as of
    `diagnose`: 1 where something is wrong, 6 where the recording cannot tell, as where the runs of CMD generate
    different texts.
    """
    asked = tap_request(engine, only, steps, capture or "full")
    target = new_session_path("attach") if output is None else may_write(output)
    if keep_dump is not None and keep_dump.exists() and (not keep_dump.is_dir() or any(keep_dump.iterdir())):
        raise UsageError(f"--keep-dump: {keep_dump} is there already: name a new folder")
    opened = None if model is None else open_to_run(model, "judging a recording")
    several = model is not None and not once and capture is None and not only
    with ScratchFolder.make("attach", target.absolute().parent) as scratch:
        dumps_folder = scratch.path / "dump" if keep_dump is None else keep_dump
        runner = RepeatedCommand(command, target, dumps_folder, scratch.path, model, opened)
        as_started = runner.as_started(asked) if compare_text else None
        runs = runner.closer(asked) if several else runner.once(asked)
        if as_started is not None:
            runs = runner.compared(runs, as_started)
    if runs.result is not None:
        judged = runs.result
        store_judgement(target, 0, verdict_rows(judged.judgement.taps), judged.event)
    _report(runs, command, as_json)
    raise typer.Exit(_code(runs))


def _code(runs: AttachedRuns) -> int:
    """The command's own exit code where that is not 0. But 1 is what a divergence ends with, and nothing else."""
    judged = Exit.OK if runs.result is None else code_of(runs.result.event)
    own = runs.attached.exit_code
    if own == Exit.DIVERGED:
        return judged or Exit.INCONCLUSIVE
    return own or judged or (Exit.INCONCLUSIVE if runs.other_text else Exit.OK)


def _report(runs: AttachedRuns, command: list[str], as_json: bool) -> None:
    """What came of it: for people on stderr, as stdout is the command's."""
    imported, result, changed = runs.imported, runs.result, runs.attached.changed
    if as_json:
        judged = {} if result is None else {"judged": result.to_json()}
        told = {"command": list(command), "code": runs.attached.code}
        print(dumps(imported.to_json() | told | runs.to_json() | judged))
        return
    if result is None:
        tell(imported.coverage.in_words())
        tell("one run, not judged: there is no --model to hold it against")
    imported.tell_rest()
    if runs.text:
        tell(runs.text)
    elif changed:
        tell("whether the command generates the same without the tap was not tried (--compare-text)")
    if result is not None:
        render_diagnosis(result.event, Console(highlight=False, soft_wrap=True, stderr=True))
