"""`lockstep mismatch`: why a rollout engine and a trainer give the same tokens other log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.workbench.cli import options
from lockstep.workbench.cli.reports import write_report
from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.export.json import dumps
from lockstep.workbench.export.lines import Panel, line_charts
from lockstep.workbench.export.svg import Picture, standalone
from lockstep.workbench.library.gap_table import share_picture
from lockstep.workbench.library.mismatching import Mismatch, mismatch
from lockstep.workbench.models.logprobs import read_logprobs

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command("mismatch")
def mismatch_command(
    rollout: Annotated[Path, typer.Argument(metavar="ROLLOUT.session")],
    trainer: Annotated[Path, typer.Argument(metavar="TRAINER.session")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="The checkpoint: each side is judged by it, and each operation's share of the gap found.",
            show_default=False,
        ),
    ] = None,
    rollout_logprobs: Annotated[
        Path | None,
        typer.Option(
            "--rollout-logprobs",
            metavar="FILE.json",
            help="The log-probabilities that the rollout reported: a list for each sequence, of the response's tokens.",
            show_default=False,
        ),
    ] = None,
    trainer_logprobs: Annotated[
        Path | None,
        typer.Option(
            "--trainer-logprobs",
            metavar="FILE.json",
            help="Those that the trainer reported.",
            show_default=False,
        ),
    ] = None,
    branch_rollout: Annotated[int, typer.Option("--branch-rollout", metavar="N")] = 0,
    branch_trainer: Annotated[int, typer.Option("--branch-trainer", metavar="N")] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the gaps.", show_default=False)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Which is the first level at which a rollout and a trainer differ: the tokens, the weights, what the
    log-probability is of, the experts, an operation, or the shape of the passes.

    Both recordings hold the same responses: `lockstep attach` records an engine, `lockstep.record` a module. The gaps
    of the response's tokens are summed up as trainers do: mean, k3, share beyond a factor of two, effective sample
    size. Exit 1 if a level differs; 6 where the recordings do not suffice.
    """
    found = mismatch(
        rollout,
        trainer,
        model=model,
        rollout_logprobs=None if rollout_logprobs is None else read_logprobs(rollout_logprobs),
        trainer_logprobs=None if trainer_logprobs is None else read_logprobs(trainer_logprobs),
        branches=(branch_rollout, branch_trainer),
    )
    print(dumps(found.to_json()) if as_json else found)
    lost = write_report(plot, lambda out: out.write(_drawn(found)))
    for words in lost:
        report_line(f"error: {words}")
    code = Exit.OK if found else Exit.DIVERGED if found.answer is not None else Exit.INCONCLUSIVE
    raise typer.Exit(code if code or not lost else Exit.NOT_SAVED)


def _drawn(found: Mismatch) -> str:
    lines, bars = line_charts(panels(found), "rollout and trainer"), share_picture(found.shares)
    if bars is None:
        return standalone(lines)
    width, height = max(lines.width, bars.width), lines.height + bars.height
    return standalone(Picture.of(width, height, lines.label, lines.content, bars.at(0.0, lines.height)))


def panels(found: Mismatch) -> list[Panel]:
    """The size of the gap by position, and both log-probabilities, of each sequence. Scales are logarithmic: a token
    without a gap has no point."""
    drawn = []
    for seq in sorted({one.seq for one in found.gaps}):
        mine = [one for one in found.gaps if one.seq == seq]
        sides = {
            "rollout": [(one.position, -one.rollout) for one in mine],
            "trainer": [(one.position, -one.trainer) for one in mine],
        }
        gap = {"gap": [(one.position, abs(one.gap)) for one in mine]}
        drawn += [
            Panel(f"sequence {seq}: |Δ log p|", "position", gap),
            Panel(f"sequence {seq}: -log p", "position", sides),
        ]
    return drawn
