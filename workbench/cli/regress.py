"""`lockstep regress`: run an engine again and hold it against a recording of when it was right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.engine.errors import panics_as_errors
from lockstep.engine.scratch import ScratchFolder
from lockstep.sessions import Session
from lockstep.sessions.keeping import keeping
from lockstep.sessions.text import clean
from lockstep.workbench.attach.launch import TapRequest, attach, how_it_ended
from lockstep.workbench.checking.regression import Regression, regression
from lockstep.workbench.cli import options
from lockstep.workbench.cli.attach_options import EngineName, Only, Passes
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.cli.reports import write_report
from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.debugger.commands.row_diff import difference_rows, in_words
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.export.json import dumps
from lockstep.workbench.export.regression import junit_of, sarif_of
from lockstep.workbench.inferior.destination import may_write
from lockstep.workbench.judgements.golden_event import plain
from lockstep.workbench.library.attached import tap_request
from lockstep.workbench.library.imported import import_attached
from lockstep.workbench.paths import find_session, new_session_path
from lockstep.workbench.settings import session_limits

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

#: What `git bisect run` takes for a commit that cannot be tested.
SKIP = 125
#: Rows of the table of what differs.
_ROWS = 12
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
    engine: EngineName = "auto",
    only: Only = None,
    steps: Passes = None,
    capture: Annotated[
        str, typer.Option("--capture", metavar="full|stats", help="As that of the baseline.")
    ] = "full",
    output: options.Output = None,
    junit_file: options.JUnit = None,
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
        asked = tap_request(engine, only, steps, capture)
        target = new_session_path("regress") if output is None else may_write(output)
        with panics_as_errors():
            reported = _run(command, find_session(baseline), bitwise, asked, target)
            lost = report(reported, target, baseline, junit_file, sarif_file, as_json)
    except Exception as error:
        if not bisect:
            raise
        report_line(f"skipped: {clean(str(error), limit=500)}")
        raise typer.Exit(SKIP) from error
    code = _CODES[reported.verdict]
    if bisect:  # a commit is good or bad whatever was written of it
        raise typer.Exit(SKIP if code == Exit.INCONCLUSIVE else code)
    raise typer.Exit(code or (Exit.NOT_SAVED if lost else Exit.OK))


def _run(command: list[str], baseline: Path, bitwise: bool, asked: TapRequest, target: Path) -> Regression:
    limits = session_limits()
    with Session.open(baseline, limits) as good:
        with ScratchFolder.make("regress", target.absolute().parent) as scratch:
            attached = attach(command, scratch.path / "dump", asked, scratch.path)
            with Status() as status:
                imported = import_attached(attached, target, None, status)
        for line in imported.lines():
            report_line(line)
        if ended := how_it_ended(attached.code):
            report_line(f"the command {ended}; what it did until then is compared")
        with Session.open(target, limits) as run, run.walk(good), keeping(run, good):
            return regression(run, good, bitwise=bitwise)


def _show_differing(result: Regression, again: str) -> None:
    """The operations that differ, cut to what leaves the verdict below them on a screen; `again` shows all."""
    differing = result.comparison.differing
    if not differing:
        return
    print(difference_rows(result.comparison, most=_ROWS).to_text())
    if (more := len(differing) - _ROWS) > 0:
        print(f"and {more} more: `{again}` shows all of them")


def report(
    result: Regression, session: Path, baseline: Path, junit_file: Path | None, sarif_file: Path | None, as_json: bool
) -> list[str]:  # fmt: skip
    """What came of it, on stdout and in the files that were asked for; which of these could not be written."""
    if as_json:
        print(dumps({"session": str(session), "baseline": str(baseline), **plain(result)}))
    else:
        again = f"lockstep diff {baseline} {session} --bitwise"
        _show_differing(result, again)
        report_line(f"recorded in {session}; compare again with: {again}")
        print(result.coverage.in_words())
        within = "within" if result.verdict == "match" else "beyond"
        how = f"{within} rounding ({result.tolerance:.2g} relative)" if result.tolerance else "bit for bit"
        print(f"{result.verdict}, {how}: {result.why or in_words(result.comparison)}")
    lost = write_report(junit_file, lambda out: out.write(junit_of(result)))
    lost += write_report(sarif_file, lambda out: out.write(sarif_of(result, session.name)))
    for words in lost:
        report_line(f"error: {words}")
    return lost
