"""`lockstep check`: the engine against a reference, teacher-forced, every tap; the first divergence and its cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, TextIO

import typer
from rich.console import Console

from sessions import Session
from sessions.limits import UNLIMITED
from sessions.text import clean
from workbench.checking.pipeline import CheckResult
from workbench.cli import options
from workbench.cli.checked_model import ModelToCheck
from workbench.cli.invariants import check_invariants
from workbench.cli.progress import Status
from workbench.cli.terminal import tell
from workbench.exit_codes import Exit, UsageError
from workbench.export import csv, junit
from workbench.export.cases import cases
from workbench.export.check_text import render, where
from workbench.export.json import dumps
from workbench.inferior.destination import may_write
from workbench.models.opening import OpenedModel
from workbench.paths import new_session_path, sessions_directory
from workbench.references.cache import prune
from workbench.views.golden_event import GoldenEvent

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

#: Bytes that sessions of checks may take which nobody named a file for.
UNNAMED_BYTES = 2 << 30

_COLUMNS = (
    "step",
    "seq",
    "tap",
    "verdict",
    "max_abs",
    "rel_l2",
    "cosine",
    "floor",
    "ratio",
    "injected",
    "injected_ratio",
    "inherited",
    "reason",
)


@app.command()
def check(
    model: options.Model,
    prompt: options.Prompts = None,
    ids: options.Ids = None,
    chat: options.Chat = False,
    tp: options.Tp = 1,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=0, help="Decode steps after the prefill.")
    ] = 8,
    rule: options.Rules = None,
    device: options.Device = "cpu",
    dtype: options.DType = "auto",
    invariants: Annotated[
        bool,
        typer.Option(
            "--invariants",
            help="Without a reference: what is true of every right engine, such as TP 1 = TP N, prefill = decode, "
            "alone = in a batch, no token sees a later one.",
        ),
    ] = False,
    floor: Annotated[
        str,
        typer.Option(
            "--floor",
            metavar="auto|fixed",
            help="auto: errors are held against the reference's own at this dtype; fixed: against a constant.",
        ),
    ] = "auto",
    reference: options.Reference = "transformers",
    load: options.Load = "direct",
    weights: options.Weights = "dequantised",
    batch_invariant: options.BatchInvariant = False,
    save: options.Save = None,
    junit_file: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write a JUnit report.", show_default=False)
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write every judgement.", show_default=False)
    ] = None,
    timeout: options.Timeout = 60.0,
    start_timeout: options.StartTimeout = 300.0,
    listen: options.Listen = "",
    as_json: options.Json = False,
) -> None:
    """Hold the engine against transformers or llama.cpp: prefill and decode, teacher-forced, tap by tap.

    Exit code 0: it matches. 1: it diverged, and the first wrong operation (or what is broken) is named. 3: it matches,
    but what was to be saved could not be. 6: inconclusive, the reference overflows at this dtype.
    """
    several = len([*(prompt or ()), *(ids or ())]) > 1
    if invariants and (save or csv_file or several or (floor, reference) != ("auto", "transformers")):
        raise UsageError(
            "--invariants needs no reference and records nothing: leave out --save, --csv, --floor and --reference, "
            "and give one prompt"
        )
    if floor not in ("auto", "fixed"):
        raise UsageError(f"--floor is auto or fixed, not {floor!r}")
    chosen = options.reference_of(reference)
    asked = ModelToCheck.of(
        model, texts=prompt, ids=ids, chat=chat, steps=steps, rules=rule, tp=tp, device=device, dtype=dtype,
        load=load, weights=weights, batch_invariant=batch_invariant, timeout=timeout, start_timeout=start_timeout,
        listen=listen,
    )  # fmt: skip
    opened = asked.opened
    if invariants:
        raise typer.Exit(check_invariants(asked, junit_file, as_json))
    target = may_write(save) if save else new_session_path(f"check-{opened.name}-tp{tp}")
    with TemporaryDirectory(prefix="lockstep-check-") as scratch:
        with Status() as status:
            recorded = asked.reference(status, chosen, floor == "auto")
            with asked.engine(status) as inferior:
                result = asked.check(inferior, recorded, target, Path(scratch) / "check.session", status)
        if as_json:
            print(dumps(result.to_json()))
        else:
            print(clean(asked.in_words()))
            render(result.event, result.judgement.taps, Console(highlight=False, soft_wrap=True))
        lost = [f"{target} lacks {result.lost}"] if result.lost else []
        if junit_file is not None:
            lost += _written(junit_file, lambda out: out.write(_junit(opened, tp, result)))
        if csv_file is not None:
            lost += _written(csv_file, lambda out: _csv(out, result))
    if save is None and not result.lost:
        prune(sessions_directory(), keep=target, limit=UNNAMED_BYTES, names="check-*.session")
    for words in lost:
        tell(f"error: {words}")
    if not result.lost and not as_json:
        tell(f"recorded in {target}")
    # A divergence is told before a loss: whoever reads the code must not take a wrong model for a full disk.
    asked_for = lost if save is not None or not result.lost else lost[1:]
    told = code_of(result.event)
    raise typer.Exit(told or (Exit.NOT_SAVED if asked_for else Exit.OK))


def code_of(event: GoldenEvent) -> Exit:
    """What the process says of a verdict."""
    told = {"diverged": Exit.DIVERGED, "inconclusive": Exit.INCONCLUSIVE}
    return told.get(event.verdict, Exit.OK)


def _written(file: Path, write: Callable[[TextIO], object]) -> list[str]:
    """Write a report; what is to be said where that is not possible."""
    try:
        with file.open("w", encoding="utf-8", newline="") as out:
            write(out)
    except OSError as error:
        return [f"{file} is not written: {error.strerror}"]
    return []


def _csv(out: TextIO, result: CheckResult) -> None:
    csv.write(out, _COLUMNS, ([getattr(one, name) for name in _COLUMNS] for one in result.judgement.taps))


def _junit(model: OpenedModel, tp: int, result: CheckResult) -> str:
    """A test for the verdict, whose failure names the first wrong operation and its cause; then one a tap."""
    first = result.event.first_divergence
    named = "" if first is None else f"first wrong: {where(first, tp)}"
    causes = "\n".join(cause.text for cause in result.causes)
    verdict = junit.JUnitCase(
        "check",
        "verdict",
        f"matches {result.event.reference}",
        "pass" if result.matches else "fail",
        named,
        causes,
    )
    with Session.open(result.engine_session, UNLIMITED) as session:
        return junit.junit(f"lockstep check {model.name} --tp {tp}", [verdict, *cases(session)])
