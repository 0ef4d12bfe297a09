"""`lockstep faults`: the catalogue of known bugs that can be switched on."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Annotated

import typer

from lockstep.engine.config import EngineConfig, check_fit
from lockstep.engine.faults.catalogue import DEFAULTS, FAULTS
from lockstep.engine.faults.fault import Fault
from lockstep.engine.text import did_you_mean, printable
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.export.json import dumps
from lockstep.workbench.models.opening import OpenedModel, open_model

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

#: Where what a fault does begins.
_INDENT = 28
_LEVELS = {"step": "acts from the next step", "build": "empties the cache", "load": "reads weights again"}


@app.command()
def faults(
    word: Annotated[
        str,
        typer.Argument(
            metavar="[WORD]",
            help="Show those alone whose name, group, place or description has it: rope, mask=none.",
            show_default=False,
        ),
    ] = "",
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="Show which can act on this model.", show_default=False
        ),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", metavar="N", min=1, help="… at this tensor parallelism.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array on stdout.")] = False,
) -> None:
    """List the known bugs that `--fault NAME=VALUE` switches on: what each does and where it shows first."""
    opened = None if model is None else open_model(model)
    if opened is not None:
        check_fit(opened.config, EngineConfig(tp=tp))
    shown = _with(word)
    if as_json:
        print(dumps([_as_json(fault, opened, tp) for fault in shown]))
        return
    group = ""
    for fault in shown:
        if fault.group != group:
            group = fault.group
            print(f"\n{group}" if fault is not shown[0] else group)
        _print(fault, None if opened is None else fault.needs(opened.config, tp))


def _with(word: str) -> list[Fault]:
    """The faults that have it somewhere in what is listed of them; UsageError where none has."""
    asked = word.casefold()
    found = [
        one
        for one in FAULTS
        if any(
            asked in text.casefold()
            for text in (f"{one.seam}={one.value}", one.group, one.first_tap, one.title, one.symptom)
        )
    ]
    if not found:
        names = {name for one in FAULTS for name in (one.seam, f"{one.seam}={one.value}")}
        advice = did_you_mean(word, names, "`lockstep faults` lists all")
        raise UsageError(f"no fault has {printable(word)!r} in its name or description: {advice}")
    return found


def _as_json(fault: Fault, model: OpenedModel | None, tp: int) -> dict[str, object]:
    row: dict[str, object] = {
        "name": fault.seam,
        "value": fault.value,
        "default": DEFAULTS[fault.seam],
        "title": fault.title,
        "group": fault.group,
        "level": fault.level,
        "first_tap": fault.first_tap,
        "step": fault.step,
        "symptom": fault.symptom,
        "source": fault.source or None,
    }
    if model is not None:
        reason = fault.needs(model.config, tp)
        row |= {"acts": reason is None, "reason": reason}
    return row


def _print(fault: Fault, reason: str | None) -> None:
    phase = "prefill" if fault.step == 0 else f"step {fault.step}"
    _fold(f"  {fault.seam}={fault.value:<{max(1, 24 - len(fault.seam))}} ", fault.title)
    if reason is not None:
        _fold("", f"cannot act here: {reason}")
        return
    _fold("", fault.symptom)
    _fold("", f"first at {fault.first_tap.removeprefix('layers.*.')}, {phase}; {_LEVELS[fault.level]}")


def _fold(head: str, text: str) -> None:
    """A line with its text in the second column, folded to the terminal; whole where none reads it."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    first, later = head.ljust(_INDENT), " " * _INDENT
    print(
        textwrap.fill(text, max(width, 2 * _INDENT), initial_indent=first, subsequent_indent=later,
                      break_long_words=False, break_on_hyphens=False)
    )  # fmt: skip
