"""`lockstep regress`: run an engine again and hold it against a recording of when it was right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from engine.scratch import ScratchFolder
from sessions import Session
from sessions.text import clean
from workbench.attach.launch import CAPTURES, ENGINES, attach, how_it_ended
from workbench.checking.regression import Regression, regression
from workbench.cli import options
from workbench.cli.attach import ALWAYS, import_attached
from workbench.cli.progress import Status
from workbench.cli.terminal import tell
from workbench.debugger.commands.row_diff import difference_rows, in_words
from workbench.exit_codes import Exit, UsageError
from workbench.export.json import dumps
from workbench.export.regression import junit_of, sarif_of
from workbench.inferior.destination import may_write
from workbench.paths import find_session, new_session_path
from workbench.settings import session_limits
from workbench.views.golden_event import plain

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

#: What `git bisect run` takes for a commit that cannot be tested.
SKIP = 125
_CODES = {"match": Exit.OK, "diverged": Exit.DIVERGED, "inconclusive": Exit.INCONCLUSIVE}


@app.command()
def regress(
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD…", help="The engine's own command.", show_default=False)
    ],
    baseline: Annotated[
        Path, typer.Option("--baseline", metavar="GOOD.session", help="A recording of when it was right.")
    ],
    bitwise: Annotated[
        bool, typer.Option("--bitwise", help="Every bit counts; else what is beyond rounding does.")
    ] = False,
    bisect: Annotated[
        bool,
        typer.Option("--bisect", help="For `git bisect run`: exit 125 (skip) where there is no verdict."),
    ] = False,
    engine: Annotated[
        str, typer.Option("--engine", metavar="auto|vllm|sglang|nano|torch", help="What to look for.")
    ] = "auto",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="GLOB", help="Record these taps alone; repeatable.", show_default=False),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="N", min=0, help="Record no more after N passes.", show_default=False),
    ] = None,
    capture: Annotated[
        str, typer.Option("--capture", metavar="full|stats", help="As that of the baseline.")
    ] = "full",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="RUN.session", help="Where the new recording goes.", show_default=False),
    ] = None,
    junit_file: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write a JUnit report.", show_default=False)
    ] = None,
    sarif_file: Annotated[
        Path | None, typer.Option("--sarif", metavar="FILE", help="Write SARIF 2.1.0.", show_default=False)
    ] = None,
    as_json: options.Json = False,
) -> None:  # fmt: skip
    """Run an engine's own command under the tap and compare it, row by row, with a recording of the same prompts.

    Exit code 0: it computes what it did. 1: it does not, and the first operation with equal inputs and an unequal
    output is named. 6: inconclusive, as where other tokens were read or the command failed.
    """
    try:
        told, session = _run(command, baseline, bitwise, engine, only, steps, capture, output)
        _report(told, session, baseline, junit_file, sarif_file, as_json)
    except Exception as error:
        if not bisect:
            raise
        tell(f"skipped: {clean(str(error), limit=500)}")
        raise typer.Exit(SKIP) from error
    code = _CODES[told.verdict]
    raise typer.Exit(SKIP if bisect and code == Exit.INCONCLUSIVE else code)


def _run(
    command: list[str],
    baseline: Path,
    bitwise: bool,
    engine: str,
    only: list[str] | None,
    steps: int | None,
    capture: str,
    output: Path | None,
) -> tuple[Regression, Path]:
    chosen = next((one for one in ENGINES if one == engine), None)
    kept = next((one for one in CAPTURES if one == capture), None)
    if chosen is None or kept is None:
        raise UsageError(f"--engine is one of {', '.join(ENGINES)}, --capture one of {', '.join(CAPTURES)}")
    target = new_session_path("regress") if output is None else may_write(output)
    limits = session_limits()
    with Session.open(find_session(baseline), limits) as good:
        with ScratchFolder.make("regress", target.absolute().parent) as scratch:
            attached = attach(
                command, scratch.path / "dump", engine=chosen, only=(*only, *ALWAYS) if only else (), steps=steps,
                capture=kept,
            )  # fmt: skip
            with Status() as status:
                imported = import_attached(attached, target, None, status)
        for line in imported.lines():
            tell(line)
        if ended := how_it_ended(attached.code):
            tell(f"the command {ended}; what it did until then is compared")
        with Session.open(target, limits) as run, run.walk(good):
            return regression(run, good, bitwise=bitwise), target


def _report(
    told: Regression, session: Path, baseline: Path, junit_file: Path | None, sarif_file: Path | None, as_json: bool
) -> None:  # fmt: skip
    """What came of it, on stdout and in the files that were asked for."""
    if as_json:
        print(dumps({"session": str(session), "baseline": str(baseline), **plain(told)}))
    else:
        print(told.coverage.in_words())
        how = "bit for bit" if not told.tolerance else f"beyond rounding ({told.tolerance:.2g} relative)"
        print(f"{told.verdict}, {how}: {told.why or in_words(told.comparison)}")
        if told.comparison.differing:
            print(difference_rows(told.comparison).to_text())
        tell(f"recorded in {session}; compare again with: lockstep diff {baseline} {session} --bitwise")
    reports: list[tuple[Path | None, Callable[[], str]]] = [
        (junit_file, lambda: junit_of(told)),
        (sarif_file, lambda: sarif_of(told, session.name)),
    ]
    for file, made in reports:
        if file is not None:
            file.write_text(made(), encoding="utf-8")
