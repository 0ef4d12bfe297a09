"""`lockstep import`: the dump of another engine as a session."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.engine.extras import install, is_installed
from lockstep.workbench.cli import options
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.cli.terminal import tell
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.export.json import dumps
from lockstep.workbench.foreign.added import ELSEWHERE, format_names, open_dump
from lockstep.workbench.foreign.name_map import NameMap
from lockstep.workbench.inferior.destination import may_write
from lockstep.workbench.library.imported import ImportedRun, import_as
from lockstep.workbench.models.opening import open_model
from lockstep.workbench.paths import new_session_path

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command("import")
def import_dump(
    form: Annotated[str, typer.Argument(metavar="FORMAT", help=f"One of {', '.join(format_names())}.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that was dumped into.")],
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

    Rows are placed by request and position, whatever passes they were packed into; what is dropped is told.
    """
    if form not in (*(known := format_names()), *ELSEWHERE):
        raise UsageError(f"FORMAT is one of {', '.join(known)}, not {form!r}")
    target = new_session_path(f"import-{form}") if output is None else may_write(output)
    reported = None if names is None else NameMap.read(names)
    with Status() as status:
        opened = None if model is None else open_model(model)
        if opened is not None and not is_installed("engine"):
            status.warn(f"the texts of the tokens are left out: {install('engine')} brings what reads them")
        run = open_dump(form, folder, None if opened is None else opened.directory)
        if reported is not None:
            run = reported.applied(run)
        imported = import_as(run, form, target, opened, status)
    if as_json:
        print(dumps(imported.to_json()))
        return
    print(imported.coverage.in_words())
    tell_rest(imported)


def tell_rest(imported: ImportedRun) -> None:
    """On stderr, what else there is to know of it than the coverage."""
    for line in imported.lines():
        tell(line)
    tell(f"recorded in {imported.session}")
