"""What `attach` and `regress` share: their options, the run that these ask for, and the session that comes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lockstep.sessions.text import clean
from lockstep.workbench.attach.launch import CAPTURES, ENGINES, Attached, TapRequest, how_it_ended
from lockstep.workbench.cli.import_dump import ImportedRun, import_as
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.extensions import extensions
from lockstep.workbench.foreign.readers.lockstep import LockstepDump
from lockstep.workbench.models.opening import OpenedModel

EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="auto|vllm|sglang|nano|torch",
        help="What to look for in its processes; torch: a model of transformers in any program. "
        "Packages may add others.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="GLOB",
        help="Record these taps alone, as layers.3.*; repeatable.",
        show_default=False,
    ),
]
Passes = Annotated[
    int | None,
    typer.Option(
        "--steps",
        metavar="N",
        min=0,
        help="Record no more after N passes of decode; the command goes on.",
        show_default=False,
    ),
]


def tap_request(engine: str, only: list[str] | None, steps: int | None, capture: str) -> TapRequest:
    """What the options ask for. UsageError for a word that is none."""
    kept = next((one for one in CAPTURES if one == capture), None)
    if engine not in ENGINES and engine not in (added := extensions("lockstep.engines", ENGINES)):
        raise UsageError(f"--engine is one of {', '.join((*ENGINES, *added))}, not {engine!r}")
    if kept is None:
        raise UsageError(f"--capture is {' or '.join(CAPTURES)}, not {capture!r}")
    return TapRequest(engine, tuple(only or ()), steps, kept)


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
