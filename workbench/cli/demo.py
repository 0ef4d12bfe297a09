"""`lockstep demo`: the debugger's main job, as a story in about a minute."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from lockstep.sessions.text import clean
from lockstep.workbench.checking.pipeline import CheckResult
from lockstep.workbench.cli import options
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.cli.story import Chapter, Narrator, run_story
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.export.check_text import explain, table, verdict
from lockstep.workbench.export.json import dumps
from lockstep.workbench.models.opening import OpenedModel
from lockstep.workbench.paths import sessions_directory

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

_TITLES = {
    1: "The engine as it should be",
    2: "The same engine, but the q/k/v biases are never loaded",
    3: "The fix: the biases are loaded again",
}


@app.command()
def demo(
    tp: options.Tp = 2,
    fast: Annotated[bool, typer.Option("--fast", help="Fewer steps, fixed tolerances.")] = False,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="DIR", help="Leave the sessions there.", show_default=False),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """A run that is right, the same run with a bug, the bug named, the fix: on the embedded model.

    Exit code 0 if the story ends as it should.
    """
    directory = save or sessions_directory()
    directory.mkdir(parents=True, exist_ok=True)
    with Status() as status:
        aloud = Aloud(status, Console(highlight=False, soft_wrap=True))
        runs = run_story(Quiet(status) if as_json else aloud, directory, tp=tp, fast=fast)
    if as_json:
        print(dumps({"tp": tp, "runs": [run.to_json() for run in runs]}))
    if [run.result.matches for run in runs] != [True, False, True]:
        raise typer.Exit(Exit.DIVERGED)


class Quiet(Narrator):
    """Prints nothing but what is being done."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def working(self, what: str, done: int, of: int) -> None:
        """The line on stderr."""
        self._status.count(what, done, of)

    def warning(self, text: str) -> None:
        """A line of its own on stderr."""
        self._status.warn(text)


class Aloud(Quiet):
    """Prints the story on stdout."""

    def __init__(self, status: Status, console: Console) -> None:
        super().__init__(status)
        self._console = console

    def opening(self, model: OpenedModel, question: str, tp: int) -> None:
        """The model, the ranks, the question."""
        config = model.config
        self._paragraph(
            f"A small {config.family} model ({config.num_layers} layers, {config.num_heads} heads, real q/k/v biases) "
            f"runs split over {tp} rank{'s' * (tp > 1)} on the CPU. It is asked:"
        )
        self._console.print(f"    {question}", style="italic")

    def chapter(self, number: int, rules: Mapping[str, str]) -> None:
        """A heading with the rules in force."""
        self._status.clear()
        switched = ", ".join(f"{name}={value}" for name, value in rules.items())
        title = Text(f"{number}  {_TITLES[number]}", "bold")
        if switched:
            title.append(f"   {switched}", "not bold yellow")
        self._console.print()
        self._console.print(title)
        self._console.print()

    def text(self, text: str, right: bool) -> None:
        """The answer in a frame: green for a haiku with the word, red for anything else."""
        shown = Text(clean(text.strip(), newlines=True))
        stated = "three lines, with the word" if right else "not what was asked for"
        self._console.print(
            Panel(shown, title=stated, title_align="left", border_style="green" if right else "red", width=60)
        )

    def judged(self, number: int, result: CheckResult) -> None:
        """The whole report where something is wrong, else its last lines."""
        self._status.clear()
        steps = max(one.step for one in result.judgement.taps)
        if result.matches:
            self._paragraph(
                f"Held against transformers on the same tokens, every tensor of the prefill and {steps} decode steps:"
            )
        else:
            self._paragraph(
                "The text shows that something is wrong, not what. The tensors do, operation by operation:"
            )
            table(result.event, result.judgement.taps, self._console)
            self._console.print()
            explain(result.event, self._console)
        verdict(result.event, result.judgement.taps, self._console)

    def closing(self, runs: list[Chapter]) -> None:
        """Where the sessions are, and what to do with them."""
        right, wrong, restored = runs
        self._status.clear()
        self._console.print()
        if restored.text == right.text and restored.result.matches:
            self._paragraph("The same words as at first, and the same numbers as transformers.")
        self._paragraph("Both runs are recorded, and can be walked through without the model:")
        for run in (right, wrong):
            self._console.print(Text(f"    lockstep replay {run.result.engine_session}", "cyan"))
        if not sys.stdout.isatty():
            return
        self._paragraph("Without a word, `lockstep` opens the screens.")

    def _paragraph(self, text: str) -> None:
        self._console.print(textwrap.fill(text, min(100, self._console.width)))
