"""`lockstep check`: the engine against a reference, teacher-forced, every tap; the first divergence and its cause."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console

from lockstep.engine.scratch import ScratchFolder
from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.sessions.text import clean
from lockstep.workbench.cli import options
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.cli.reports import write_report
from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.export import csv, junit
from lockstep.workbench.export.cases import cases
from lockstep.workbench.export.check_text import inconclusive, render, where
from lockstep.workbench.export.json import dumps
from lockstep.workbench.judgements.golden_event import GoldenEvent
from lockstep.workbench.paths import session_of

if TYPE_CHECKING:
    from lockstep.workbench.checking.pipeline import CheckResult
    from lockstep.workbench.library.verdict import Verdict

#: Shown while what judges is imported.
STARTING = "loading the libraries"

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

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
    prompt_tokens: options.PromptTokens = None,
    tp: options.Tp = 1,
    ep: options.Ep = 1,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=0, help="Decode steps after the prefill.")
    ] = 8,
    fault: options.Faults = None,
    device: options.Device = "cpu",
    dtype: options.DType = "auto",
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
    chunk: options.Chunk = None,
    replay_routing: Annotated[
        str | None,
        typer.Option(
            "--replay-routing",
            metavar="ids|weights",
            help="Of experts: run once more with the reference's experts (ids), or these and their weights, forced "
            "onto the engine, and report how much of the difference goes.",
            show_default=False,
        ),
    ] = None,
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

    A recording is held against transformers on the tokens that it read; what the verdict rests on is reported first.

    Exit code 0: it matches. 1: it diverged, and the first wrong operation is named. 3: it matches, but what was to be
    saved could not be. 6: inconclusive, the reference overflows at this dtype, or a recording does not carry a verdict.
    """
    recording = session_of(target)
    with ScratchFolder.make("check") as scratch:
        with Status() as status:
            status.report(STARTING)
            from lockstep.workbench.library import judging  # seconds, on a slow machine

            found = judging.check(
                target, prompt=prompt, ids=ids, chat=chat, prompt_tokens=prompt_tokens, tp=tp, ep=ep, steps=steps,
                faults=fault, device=device, dtype=dtype, floor=floor, reference=reference, load=load, weights=weights,
                batch_invariant=batch_invariant, chunk=chunk, replay_routing=replay_routing, model=model, golden=golden,
                branch=branch, save=save,
                spare=scratch.path / "check.session", timeout=timeout, start_timeout=start_timeout, listen=listen,
                progress=status,
            )  # fmt: skip
        if as_json:
            print(dumps(found.to_json()))
        else:
            if found.subject:
                print(clean(found.subject))
            render(found.event, found.taps, Console(highlight=False, soft_wrap=True))
        judged = found.result.engine_session
        if recording is not None and junit_file is not None:
            judged = save or scratch.path / "judged.session"
            if save is None:
                judging.store_judged(recording, branch, found.result, judged)
        named = f"{found.model} --tp {tp}" if recording is None else recording.name
        title = f"lockstep check {named}"
        lost = write_report(junit_file, lambda out: out.write(_junit(title, found.result, judged)))
        lost += write_report(csv_file, lambda out: _csv(out, found.result))
    raise typer.Exit(_ended(found, save if recording is not None else found.session, save, lost, as_json))


def code_of(event: GoldenEvent) -> Exit:
    """The exit code of a verdict."""
    reported = {"diverged": Exit.DIVERGED, "inconclusive": Exit.INCONCLUSIVE}
    return reported.get(event.verdict, Exit.OK)


def _csv(out: TextIO, result: CheckResult) -> None:
    csv.write(out, _COLUMNS, ([getattr(one, name) for name in _COLUMNS] for one in result.judgement.taps))


def _ended(found: Verdict, place: Path | None, save: Path | None, lost: list[str], as_json: bool) -> Exit:
    """Report what was recorded at `place`, and what is lost."""
    if found.lost:
        lost = [f"{found.place} lacks {found.lost}", *lost]
    for words in lost:
        report_line(f"error: {words}")
    if place is not None and not as_json:
        report_line(f"recorded in {place}")
    # A divergence is reported before a loss: whoever reads the code must not take a wrong model for a full disk.
    asked_for = lost if save is not None or not found.lost else lost[1:]
    return code_of(found.event) or (Exit.NOT_SAVED if asked_for else Exit.OK)


def _junit(title: str, result: CheckResult, judged: Path) -> str:
    """A test for the verdict, whose failure names the first wrong operation and its cause; then one a tap of the
    session `judged`, which has the verdicts."""
    event = result.event
    first = event.first_divergence
    named = "" if first is None else f"first wrong: {where(first, event)}"
    if event.verdict == "inconclusive":
        named = f"inconclusive: {inconclusive(event)}"
    rests = [event.coverage.in_words()] if event.coverage is not None else []
    causes = "\n".join([*rests, *(cause.text for cause in result.causes)])
    verdict = junit.JUnitCase(
        "check", "verdict", f"matches {event.reference}", "pass" if result.matches else "fail", named, causes
    )
    with Session.open(judged, UNLIMITED) as session:
        return junit.junit(title, [verdict, *cases(session)])
