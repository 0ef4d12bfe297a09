"""`lockstep attach`: run somebody else's engine with a tap on every rank, and keep what it computed as a session."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engine.scratch import ScratchFolder
from sessions.text import clean
from workbench.attach.launch import CAPTURES, ENGINES, Attached, attach, how_it_ended
from workbench.cli import options
from workbench.cli.check import code_of
from workbench.cli.import_dump import ImportedRun, import_as
from workbench.cli.progress import Status
from workbench.cli.recordings import judged_recording
from workbench.cli.terminal import tell
from workbench.exit_codes import Exit, UsageError
from workbench.export.diagnosis_text import render_diagnosis
from workbench.export.json import dumps
from workbench.foreign.readers.lockstep import LockstepDump
from workbench.inferior.destination import may_write
from workbench.models.opening import OpenedModel, open_model
from workbench.paths import new_session_path

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

#: Recorded whatever --only says: by it rows are proved to be the same, and by that the end of a step is known.
ALWAYS = ("embed", "logits")


@app.command("attach")
def attach_to(
    command: Annotated[
        list[str], typer.Argument(metavar="CMD", help="The engine's own command.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="RUN.session", help="Where the session goes.", show_default=False),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            "--engine", metavar="auto|vllm|sglang|nano|torch",
            help="What to look for in its processes; torch: a model of transformers in any program.",
        ),
    ] = "auto",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="GLOB", help="Record these taps alone, as layers.3.*; repeatable.", show_default=False
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", metavar="N", min=0, help="Record no more after N passes of decode; the command goes on.",
            show_default=False,
        ),
    ] = None,
    capture: Annotated[
        str,
        typer.Option("--capture", metavar="full|stats", help="Tensors; or of each row statistics and a hash."),
    ] = "full",
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="Its checkpoint: then the recording is judged, and its bugs are named.",
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

    Exit code: the command's own where it is not 0. 3: no rank wrote anything. With --model as of `diagnose`: 1 where
    something is wrong, 6 where the recording cannot tell.
    """
    chosen = next((one for one in ENGINES if one == engine), None)
    kept = next((one for one in CAPTURES if one == capture), None)
    if chosen is None:
        raise UsageError(f"--engine is one of {', '.join(ENGINES)}, not {engine!r}")
    if kept is None:
        raise UsageError(f"--capture is {' or '.join(CAPTURES)}, not {capture!r}")
    target = new_session_path("attach") if output is None else may_write(output)
    if keep_dump is not None and keep_dump.exists() and (not keep_dump.is_dir() or any(keep_dump.iterdir())):
        raise UsageError(f"--keep-dump: {keep_dump} is there already: name a new folder")
    opened = None if model is None else open_model(model)
    with ExitStack() as stack:
        if keep_dump is None:
            scratch = stack.enter_context(ScratchFolder.make("attach", target.absolute().parent))
            dump = scratch.path / "dump"
        else:
            dump = keep_dump
        attached = attach(
            command, dump, engine=chosen,
            only=(*only, *ALWAYS) if only else (), steps=steps,
            capture=kept,
        )  # fmt: skip
        with Status() as status:
            imported = import_attached(attached, target, opened, status)
    result = None if model is None else judged_recording(target, model, None, True, 0, "cpu")
    if as_json:
        judged = {} if result is None else {"judged": result.to_json()}
        print(dumps(imported.to_json() | {"command": list(command), "code": attached.code} | judged))
    else:
        if result is None:
            tell(imported.coverage.in_words())
        imported.tell_rest()
        if result is not None:
            render_diagnosis(result.event, Console(highlight=False, soft_wrap=True, stderr=True))
    if ended := how_it_ended(attached.code):
        tell(f"the command {ended}; what it did until then is recorded")
    raise typer.Exit(attached.exit_code or (Exit.OK if result is None else code_of(result.event)))


def import_attached(
    attached: Attached, target: Path, opened: OpenedModel | None, status: Status
) -> ImportedRun:
    """What a command left, as the session `target`."""
    run = LockstepDump.open(attached.dump)
    run = replace(run, facts=replace(run.facts, notes=(*run.facts.notes, *_notes(attached))))
    return import_as(run, "lockstep", target, opened, status)


def _notes(attached: Attached) -> list[str]:
    """What the session says of how it was recorded."""
    notes = [f"changed for the recording: {clean(text, limit=200)}" for text in attached.changed]
    notes += [f"not recorded: {clean(text, limit=500)}" for text in attached.failures]
    if ended := how_it_ended(attached.code):
        notes.append(f"the command {ended}")
    return notes
