"""`lockstep check`: the engine against a reference, teacher-forced, every tap; the first divergence and its cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, TextIO

import typer
from rich.console import Console

from sessions import Session
from sessions.limits import UNLIMITED
from sessions.text import clean
from workbench.checking.forced_run import check as run_check
from workbench.checking.forced_run import check_fits, record_reference
from workbench.checking.pipeline import CheckResult
from workbench.cli import options
from workbench.cli.progress import Status
from workbench.cli.terminal import tell
from workbench.exit_codes import Exit, UsageError
from workbench.export import csv, junit
from workbench.export.cases import cases
from workbench.export.check_text import render, where
from workbench.export.json import dumps
from workbench.inferior.destination import may_write
from workbench.inferior.inferior import Inferior
from workbench.models import requests
from workbench.models.opening import OpenedModel, open_model
from workbench.paths import new_session_path, sessions_directory
from workbench.references.cache import prune

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

#: What a model with a tokenizer is checked on when nobody says: words, digits, a rare character.
DEFAULT_TEXT = "The 3 quick brown foxes jump over 12 lazy dogs; déjà vu."
#: How many ids, spread over the vocabulary, make the prompt of a model without one.
DEFAULT_IDS = 16
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

    Exit code 0: it matches. 1: it diverged, and the first wrong operation is named. 3: it matches, but what was to
    be saved could not be. 6: inconclusive, the reference overflows at this dtype.
    """
    if floor not in ("auto", "fixed"):
        raise UsageError(f"--floor is auto or fixed, not {floor!r}")
    chosen = options.reference_of(reference)
    opened = open_model(model)
    prompts = _prompts(opened, prompt, ids, chat)
    config = requests.engine_config(
        opened,
        tp=tp,
        device=device,
        dtype=dtype,
        load=load,
        weights=weights,
        timeout=timeout,
        start_timeout=start_timeout,
        listen=listen,
    )
    config = requests.plan(opened, config, prompts, steps + 1)
    check_fits(prompts, steps, opened.config.context)
    rules = requests.rules_of(rule, opened, tp)
    target = may_write(save) if save else new_session_path(f"check-{opened.name}-tp{tp}")
    with TemporaryDirectory(prefix="lockstep-check-") as scratch:
        with Status() as status:
            recorded = record_reference(
                opened.path, prompts, steps, config.dtype, reference=chosen,
                floor=floor == "auto", device=device, progress=status.count, warn=status.warn,
            )  # fmt: skip
            status.say(f"starting {tp} rank{'s' * (tp > 1)}")
            with Inferior(opened.path, opened.config, config, rules, on_warning=status.warn) as inferior:
                result = run_check(
                    inferior, recorded, target,
                    rules=rules, model=opened, progress=status.count, spare=Path(scratch) / "check.session",
                )  # fmt: skip
        if as_json:
            print(dumps(result.to_json()))
        else:
            extent = f"{_extent(prompts)}, {steps} decode steps"
            print(clean(f"{opened.name}, tp={tp}, {config.dtype}: {extent}"))
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
    told = {"diverged": Exit.DIVERGED, "inconclusive": Exit.INCONCLUSIVE}
    raise typer.Exit(told.get(result.event.verdict, Exit.NOT_SAVED if asked_for else Exit.OK))


def _written(file: Path, write: Callable[[TextIO], object]) -> list[str]:
    """Write a report; what is to be said where that is not possible."""
    try:
        with file.open("w", encoding="utf-8", newline="") as out:
            write(out)
    except OSError as error:
        return [f"{file} is not written: {error.strerror}"]
    return []


def _prompts(
    model: OpenedModel, texts: Sequence[str] | None, ids: Sequence[str] | None, chat: bool
) -> list[list[int]]:
    """What was asked for, or something that any model can be checked on."""
    if texts or ids or model.offers_prompt:
        return requests.prompt_ids(model, texts, ids, chat)
    if model.tokenizer is not None:
        return [model.tokenizer.encode(DEFAULT_TEXT)]
    last = model.config.vocab_size - 1
    spread = [round(i * last / (DEFAULT_IDS - 1)) for i in range(DEFAULT_IDS)]
    return [[*([] if model.config.bos_id is None else [model.config.bos_id]), *spread]]


def _extent(prompts: Sequence[Sequence[int]]) -> str:
    lengths = " + ".join(str(len(prompt)) for prompt in prompts)
    return f"{lengths} prompt tokens"


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
