"""`lockstep tap`: the file that records an engine of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.sessions.text import clean
from lockstep.workbench.attach.tap_file import NAME, SOURCE, tap_file, tap_version
from lockstep.workbench.cli import options
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.export.json import dumps

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

_USE = """\
  from lockstep_tap import Tape; tape = Tape("dump", rank, size)     # in each rank
  tape.step(ids, positions); tape.tap("layers.0.attn.q_proj", q, "shard(1)")     # or attach(model, tape)
  lockstep import lockstep dump -o run.session     # then: check, diagnose, diff, tui\
"""


@app.command()
def tap(
    write: Annotated[
        Path | None,
        typer.Option(
            "--write", metavar="PATH", help="Write it there: a folder, or the file.", show_default=False
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: options.Json = False,
) -> None:
    """The one file that records what an engine of your own computes, rank by rank, for `lockstep import`.

    It needs torch and nothing else. What it writes, for engines in other languages: docs/tap-format.md.
    """
    version, format_ = tap_version()
    path = None if write is None else _written(write, force)
    if as_json:
        reported = {"file": str(SOURCE), "version": version, "format": format_, "written": path and str(path)}
        print(dumps(reported))
    elif path is not None:
        print(f"{clean(str(path))}: version {version}\n{_USE}")
    else:
        print(
            f"{NAME} {version} records what a torch engine computes, each rank into a folder (format {format_}).\n"
            f"It is in {clean(str(SOURCE.parent))};\n"
            f"`lockstep tap --write PATH` puts it into your engine; it needs torch and nothing else. Then\n{_USE}"
        )


def _written(path: Path, force: bool) -> Path:
    path = path / NAME if path.is_dir() else path
    if not path.parent.is_dir():
        raise UsageError(f"--write: {path.parent} is no folder: make it first, or name another")
    if path.exists() and not (force and path.is_file()):
        raise UsageError(f"--write: {path} is there already" + ("" if force else ": --force replaces it"))
    path.write_text(tap_file(), encoding="utf-8")
    return path
