"""Files that other packages write of a session, by the entry points `lockstep.exporters`: docs/extending.md."""

from __future__ import annotations

from pathlib import Path

from lockstep.sessions import Session, SessionError
from lockstep.workbench.export.kinds import KINDS
from lockstep.workbench.export.session_files import NothingToExport
from lockstep.workbench.extensions import Extension, extensions
from lockstep.workbench.views.request import Request


def exporters() -> dict[str, Extension]:
    """The exporters that packages add, by name."""
    return extensions("lockstep.exporters", KINDS)


def write_added(by: Extension, session: Session, path: Path, request: Request) -> None:
    """Have an exporter write `path`, which does not exist. ExtensionError where it does not; NothingToExport where it
    reports that."""
    write = by.load()
    with by.answering("it failed", NothingToExport, SessionError, OSError):
        write(session, path, request)
    if not path.is_file():
        raise by.error("it wrote no file")
