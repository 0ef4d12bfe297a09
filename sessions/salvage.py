"""A whole session of what can still be read of one that lost its newest steps."""

from __future__ import annotations

from pathlib import Path

from lockstep.sessions.copy import copy
from lockstep.sessions.format.schema import SCHEMA_VERSION
from lockstep.sessions.session import Session
from lockstep.sessions.writer import SessionWriter


def salvage(source: Path, target: Path, *, overwrite: bool = False) -> str:
    """Copy to `target` the steps that the session at `source` still shows; returns what is missing, in words, or "".

    The copy is whole, so it can be recorded on and packed; its journal states what it lacks. Errors as of `copy`, but
    for a log that is missing or damaged.
    """
    with Session.open(source) as session:
        missing, version = session.missing, session.version
    copy(source, target, overwrite=overwrite, incomplete=True)
    if missing and version == SCHEMA_VERSION:  # an older version is not written on
        with SessionWriter.reopen(target) as writer:
            newest = max(0, writer.next_step(0) - 1)
            writer.event(0, newest, "note", f"copied from {Path(source).name}, {missing}")
    return missing
