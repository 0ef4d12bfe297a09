"""`lockstep import`: the dump of another engine as a session."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.engine.extras import install, is_installed
from lockstep.workbench.cli import options
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.export.json import dumps
from lockstep.workbench.foreign.added import ELSEWHERE, format_names, open_dump
from lockstep.workbench.foreign.name_map import NameMap
from lockstep.workbench.inferior.destination import may_write
from lockstep.workbench.library.imported import ImportedRun, import_as
from lockstep.workbench.models.dumps import recognised
from lockstep.workbench.models.opening import open_model
from lockstep.workbench.paths import new_session_path

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command("import")
def import_dump(
    form: Annotated[
        str | None,
        typer.Argument(
            metavar="FORMAT",
            help=f"One of {', '.join(format_names())}. Left out, it is recognised by the names of the files.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        str | None,
        typer.Argument(metavar="DIR", help="The folder that was dumped into.", show_default=False),
    ] = None,
    output: options.Output = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="The checkpoint that was run: its shapes, and its tokens' texts.",
            show_default=False,
        ),
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(
            "--map", metavar="FILE.toml", help="Tables \\[taps] and \\[layouts]: what the engine's names stand for.",
            show_default=False,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:  # fmt: skip
    """Make a session of a dump that another engine wrote: `check`, `diff`, `diagnose` and the screens read it.

    Rows are placed by request and position, whatever passes they were packed into; what is dropped is reported.
    """
    form, home = _asked([word for word in (form, folder) if word is not None])
    target = new_session_path(f"import-{form}") if output is None else may_write(output)
    reported = None if names is None else NameMap.read(names)
    with Status() as status:
        opened = None if model is None else open_model(model)
        if opened is not None and not is_installed("engine"):
            status.warn(f"the texts of the tokens are left out: {install('engine')} brings what reads them")
        run = open_dump(form, home, None if opened is None else opened.directory)
        if reported is not None:
            run = reported.applied(run)
        imported = import_as(run, form, target, opened, status)
    if as_json:
        print(dumps(imported.to_json()))
        return
    print(imported.coverage.in_words())
    report_rest(imported)


def _asked(words: list[str]) -> tuple[str, Path]:
    """Format and folder of `[FORMAT] DIR`. UsageError lists the formats."""
    known = ", ".join(format_names())
    name_it = f"lockstep import FORMAT DIR, where FORMAT is one of {known}"
    if not words:
        raise UsageError(f"name the folder of the dump: {name_it}")
    if len(words) == 2:
        form, folder = words
        if form not in (*format_names(), *ELSEWHERE):
            raise UsageError(f"FORMAT is one of {known}, not {form!r}")
        return form, Path(folder)
    folder = words[0]
    if not Path(folder).is_dir():
        raise UsageError(f"{folder}: no such folder; name the folder of the dump: {name_it}")
    found = recognised(Path(folder))
    if len(found) != 1:
        seen = f"has files of {' and '.join(found)}" if found else "its format is not recognised"
        raise UsageError(f"{folder}: {seen}; name it: {name_it}")
    report_line(f"format {found[0]}, by the names of the files in {folder}")
    return found[0], Path(folder)


def report_rest(imported: ImportedRun) -> None:
    """On stderr, what else there is to know of it than the coverage."""
    for line in imported.lines():
        report_line(line)
    report_line(f"recorded in {imported.session}")
