"""`lockstep import`: the dump of another engine as a session."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from lockstep.engine.extras import install, is_installed
from lockstep.sessions import Session
from lockstep.sessions.meta import ForeignMeta, ModelMeta
from lockstep.workbench.cli import options
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.cli.terminal import tell
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.export.json import dumps
from lockstep.workbench.foreign.added import ELSEWHERE, format_names, open_dump
from lockstep.workbench.foreign.importing import dropped_lines, import_run
from lockstep.workbench.foreign.name_map import NameMap
from lockstep.workbench.foreign.passes import ForeignRun
from lockstep.workbench.inferior.destination import may_write
from lockstep.workbench.inferior.identity import checkpoint_digest
from lockstep.workbench.models.opening import OpenedModel, open_model
from lockstep.workbench.paths import new_session_path
from lockstep.workbench.settings import session_limits
from lockstep.workbench.views.coverage import Coverage, coverage
from lockstep.workbench.views.golden_event import plain

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

_KNOWN = format_names()


@app.command("import")
def import_dump(
    form: Annotated[str, typer.Argument(metavar="FORMAT", help=f"One of {', '.join(_KNOWN)}.")],
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
    if form not in (*_KNOWN, *ELSEWHERE):
        raise UsageError(f"FORMAT is one of {', '.join(_KNOWN)}, not {form!r}")
    target = new_session_path(f"import-{form}") if output is None else may_write(output)
    told = None if names is None else NameMap.read(names)
    with Status() as status:
        opened = None if model is None else open_model(model)
        if opened is not None and not is_installed("engine"):
            status.warn(f"the texts of the tokens are left out: {install('engine')} brings what reads them")
        run = open_dump(form, folder, None if opened is None else opened.directory)
        if told is not None:
            run = told.applied(run)
        imported = import_as(run, form, target, opened, status)
    if as_json:
        print(dumps(imported.to_json()))
        return
    print(imported.coverage.in_words())
    imported.tell_rest()


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """A foreign run that has become a session, and what is to be known of it."""

    session: Path
    coverage: Coverage
    foreign: ForeignMeta | None
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """What was left out, inferred and noted."""
        dropped = dropped_lines(self.foreign) if self.foreign else ()
        return [*self.coverage.remarks(), *dropped, *self.notes]

    def tell_rest(self) -> None:
        """On stderr, what else there is to know than the coverage."""
        for line in self.lines():
            tell(line)
        tell(f"recorded in {self.session}")

    def to_json(self) -> dict[str, object]:
        """As `--json` prints it."""
        return {
            "session": str(self.session),
            "coverage": plain(self.coverage),
            "foreign": plain(self.foreign),
            "notes": self.lines(),
        }


def import_as(
    run: ForeignRun, form: str, target: Path, opened: OpenedModel | None, status: Status
) -> ImportedRun:
    """Write a run, a dump of the format `form`, as the session `target`; `opened` is the checkpoint it is of."""
    tokenizer = None if opened is None else opened.tokenizer
    meta = import_run(
        run, target, form=form, model=None if opened is None else model_meta(opened),
        token=(lambda token: None) if tokenizer is None else tokenizer.token,
        progress=lambda done, of: status.count("pass", done, of),
    )  # fmt: skip
    with Session.open(target, session_limits()) as session, session.walk():
        return ImportedRun(target, coverage(session), meta.foreign, meta.notes)


def model_meta(opened: OpenedModel) -> ModelMeta:
    """What a session says of a checkpoint, its digest among that."""
    return msgspec.structs.replace(
        msgspec.convert(asdict(opened.config), ModelMeta),
        name=opened.name,
        path=str(opened.path),
        checkpoint=checkpoint_digest(opened.path),
    )
