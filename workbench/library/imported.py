"""What another engine left, as a session: a dump, or the tapes of a command that ran under the tap."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from lockstep.sessions import Session
from lockstep.sessions.meta import ForeignMeta, ModelMeta
from lockstep.sessions.text import clean
from lockstep.workbench.attach.launch import Attached, how_it_ended
from lockstep.workbench.foreign.importing import dropped_lines, import_run
from lockstep.workbench.foreign.passes import ForeignRun
from lockstep.workbench.foreign.readers.lockstep import LockstepDump
from lockstep.workbench.inferior.identity import checkpoint_digest
from lockstep.workbench.judgements.coverage import Coverage, coverage
from lockstep.workbench.judgements.golden_event import plain
from lockstep.workbench.library.listening import Listener
from lockstep.workbench.models.opening import OpenedModel
from lockstep.workbench.settings import session_limits


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

    def to_json(self) -> dict[str, object]:
        """As `--json` prints it."""
        return {
            "session": str(self.session),
            "coverage": plain(self.coverage),
            "foreign": plain(self.foreign),
            "notes": self.lines(),
        }


def import_as(
    run: ForeignRun, form: str, target: Path, opened: OpenedModel | None, listener: Listener
) -> ImportedRun:
    """Write a run, a dump of the format `form`, as the session `target`; `opened` is the checkpoint it is of."""
    tokenizer = None if opened is None else opened.tokenizer
    meta = import_run(
        run, target, form=form, model=None if opened is None else model_meta(opened),
        token=(lambda token: None) if tokenizer is None else tokenizer.token,
        progress=lambda done, of: listener.count("pass", done, of),
    )  # fmt: skip
    with Session.open(target, session_limits()) as session, session.walk():
        return ImportedRun(target, coverage(session), meta.foreign, meta.notes)


def model_meta(opened: OpenedModel) -> ModelMeta:
    """What a session states of a checkpoint, its digest among that."""
    return msgspec.structs.replace(
        msgspec.convert(asdict(opened.config), ModelMeta),
        name=opened.name,
        path=str(opened.path),
        checkpoint=checkpoint_digest(opened.path),
    )


def import_attached(
    attached: Attached, target: Path, opened: OpenedModel | None, listener: Listener
) -> ImportedRun:
    """What a command left, as the session `target`."""
    run = LockstepDump.open(attached.dump)
    run = replace(run, facts=replace(run.facts, notes=(*run.facts.notes, *_notes(attached))))
    return import_as(run, "lockstep", target, opened, listener)


def _notes(attached: Attached) -> list[str]:
    """What the session states of how it was recorded."""
    notes = [f"changed for the recording: {clean(text, limit=200)}" for text in attached.changed]
    notes += [f"not recorded: {clean(text, limit=500)}" for text in attached.failures]
    if ended := how_it_ended(attached.code):
        notes.append(f"the command {ended}")
    return notes
