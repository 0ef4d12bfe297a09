"""`lockstep check`: the engine against a reference, teacher-forced, every tap; the first divergence and its cause."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console

from lockstep.engine.scratch import ScratchFolder
from lockstep.sessions import Session
from lockstep.sessions.copy import copy
from lockstep.sessions.limits import UNLIMITED
from lockstep.sessions.text import clean
from lockstep.workbench.checking.pipeline import CheckResult
from lockstep.workbench.checking.verdicts import store_judgement, verdict_rows
from lockstep.workbench.cli import options
from lockstep.workbench.cli.checked_model import ModelToCheck
from lockstep.workbench.cli.invariants import check_invariants
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.cli.recordings import judged_recording
from lockstep.workbench.cli.reports import write_report
from lockstep.workbench.cli.terminal import tell
from lockstep.workbench.exit_codes import Exit, UsageError
from lockstep.workbench.export import csv, junit
from lockstep.workbench.export.cases import cases
from lockstep.workbench.export.check_text import inconclusive, render, where
from lockstep.workbench.export.json import dumps
from lockstep.workbench.inferior.destination import may_write
from lockstep.workbench.paths import new_session_path, session_of, sessions_directory
from lockstep.workbench.references.cache import prune
from lockstep.workbench.references.request import ReferenceName
from lockstep.workbench.views.golden_event import GoldenEvent

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
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|SESSION",
            help="A Hugging Face directory, a GGUF file, a hub id, or `demo`; or a recording of anybody's.",
            show_default=False,
        ),
    ],
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
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Of a recording: the checkpoint that it is of.",
            show_default=False,
        ),
    ] = None,
    golden: Annotated[
        Path | None,
        typer.Option(
            "--golden",
            metavar="G.session",
            help="Of a recording: a reference of the same tokens, if there is one.",
            show_default=False,
        ),
    ] = None,
    branch: Annotated[int, typer.Option("--branch", metavar="N", help="Of a recording: which branch.")] = 0,
    save: options.Save = None,
    junit_file: options.JUnit = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write every judgement.", show_default=False)
    ] = None,
    timeout: options.Timeout = 60.0,
    start_timeout: options.StartTimeout = 300.0,
    listen: options.Listen = "",
    as_json: options.Json = False,
) -> None:
    """Hold the engine against transformers or llama.cpp: prefill and decode, teacher-forced, tap by tap.

    A recording is held against transformers on the tokens that it read; what the verdict rests on is said first.

    Exit code 0: it matches. 1: it diverged, and the first wrong operation (or what is broken) is named. 3: it matches,
    but what was to be saved could not be. 6: inconclusive, the reference overflows at this dtype, or a recording does
    not carry a verdict.
    """
    if (recording := session_of(target)) is not None:
        if prompt or ids or rule or reference != "transformers" or floor != "auto" or tp != 1 or invariants:
            raise UsageError(
                "--prompt, --ids, --rule, --tp, --floor, --reference and --invariants are for a model: a recording is "
                "read as it is"
            )
        saved = may_write(save) if save else None
        result = judged_recording(recording, model, golden, True, branch, device)
        raise typer.Exit(_of_recording(recording, branch, result, saved, junit_file, csv_file, as_json))
    if model is not None or golden is not None:
        raise UsageError("--model and --golden are for a recording: give RUN.session, or MODEL alone")
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
        target, texts=prompt, ids=ids, chat=chat, steps=steps, rules=rule, tp=tp, device=device, dtype=dtype,
        load=load, weights=weights, batch_invariant=batch_invariant, timeout=timeout, start_timeout=start_timeout,
        listen=listen,
    )  # fmt: skip
    if invariants:
        raise typer.Exit(check_invariants(asked, junit_file, as_json))
    raise typer.Exit(_of_model(asked, chosen, floor == "auto", save, junit_file, csv_file, as_json))


def code_of(event: GoldenEvent) -> Exit:
    """What the process says of a verdict."""
    told = {"diverged": Exit.DIVERGED, "inconclusive": Exit.INCONCLUSIVE}
    return told.get(event.verdict, Exit.OK)


def _csv(out: TextIO, result: CheckResult) -> None:
    csv.write(out, _COLUMNS, ([getattr(one, name) for name in _COLUMNS] for one in result.judgement.taps))


def _of_model(
    asked: ModelToCheck, library: ReferenceName, floor: bool, save: Path | None, junit_file: Path | None,
    csv_file: Path | None, as_json: bool,
) -> Exit:  # fmt: skip
    """Run a model, hold it against the reference, tell what came of it, and write what was asked for."""
    opened, tp = asked.opened, asked.config.tp
    place = may_write(save) if save else new_session_path(f"check-{opened.name}-tp{tp}")
    with ScratchFolder.make("check") as scratch:
        with Status() as status:
            recorded = asked.reference(status, library, floor)
            with asked.engine(status) as inferior:
                result = asked.check(inferior, recorded, place, scratch.path / "check.session", status)
        if as_json:
            print(dumps(result.to_json()))
        else:
            print(clean(asked.in_words()))
            render(result.event, result.judgement.taps, Console(highlight=False, soft_wrap=True))
        lost = [f"{place} lacks {result.lost}"] if result.lost else []
        title = f"lockstep check {opened.name} --tp {tp}"
        lost += write_report(junit_file, lambda out: out.write(_junit(title, result, result.engine_session)))
        lost += write_report(csv_file, lambda out: _csv(out, result))
    if save is None and not result.lost:
        prune(sessions_directory(), keep=place, limit=UNNAMED_BYTES, names="check-*.session")
    for words in lost:
        tell(f"error: {words}")
    if not result.lost and not as_json:
        tell(f"recorded in {place}")
    # A divergence is told before a loss: whoever reads the code must not take a wrong model for a full disk.
    asked_for = lost if save is not None or not result.lost else lost[1:]
    told = code_of(result.event)
    return told or (Exit.NOT_SAVED if asked_for else Exit.OK)


def _of_recording(
    path: Path, branch: int, result: CheckResult, save: Path | None, junit_file: Path | None, csv_file: Path | None,
    as_json: bool,
) -> Exit:  # fmt: skip
    """Tell what came of a recording, and write what was asked for; the recording itself stays as it is."""
    if as_json:
        print(dumps(result.to_json()))
    else:
        render(result.event, result.judgement.taps, Console(highlight=False, soft_wrap=True))
    lost = write_report(csv_file, lambda out: _csv(out, result))
    if save is not None or junit_file is not None:
        with ScratchFolder.make("check") as scratch:
            judged = save or scratch.path / "judged.session"
            copy(path, judged, overwrite=True)
            store_judgement(judged, branch, verdict_rows(result.judgement.taps, branch), result.event)
            title = f"lockstep check {path.name}"
            lost += write_report(junit_file, lambda out: out.write(_junit(title, result, judged)))
    for words in lost:
        tell(f"error: {words}")
    if save is not None and not as_json:
        tell(f"recorded in {save}")
    return code_of(result.event) or (Exit.NOT_SAVED if lost else Exit.OK)


def _junit(title: str, result: CheckResult, judged: Path) -> str:
    """A test for the verdict, whose failure names the first wrong operation and its cause; then one a tap of the
    session `judged`, which has the verdicts."""
    event = result.event
    first = event.first_divergence
    named = "" if first is None else f"first wrong: {where(first, event.tp)}"
    if event.verdict == "inconclusive":
        named = f"inconclusive: {inconclusive(event)}"
    rests = [event.coverage.in_words()] if event.coverage is not None else []
    causes = "\n".join([*rests, *(cause.text for cause in result.causes)])
    verdict = junit.JUnitCase(
        "check", "verdict", f"matches {event.reference}", "pass" if result.matches else "fail", named, causes
    )
    with Session.open(judged, UNLIMITED) as session:
        return junit.junit(title, [verdict, *cases(session)])
