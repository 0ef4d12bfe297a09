"""A session of an earlier format version as one of the present version: read as ever, and recorded anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lockstep.sessions.records import TensorRecord
from lockstep.sessions.session import Session
from lockstep.sessions.writer import SessionWriter


def convert(path: Path, to: Path) -> None:
    """Write to `to`, where nothing is yet, all that the session at `path` holds. `SessionError` where it is damaged
    as far as can be determined; what was damaged before unnoticed is sealed as it is."""
    with Session.open(path) as session:
        meta, ranks = session.meta, session.ranks
        with SessionWriter.create(to, taps=session.taps, ranks=ranks, meta=meta) as writer:
            for branch in session.branches():
                if branch.id:
                    writer.branch(
                        branch.name, parent=branch.parent, fork_step=branch.fork_step, rules=branch.rules
                    )
                for step in session.own_steps(branch.id):
                    record = replace(
                        session.step(step, branch.id),
                        stats=session.stats(step, branch.id),
                        checksums=session.checksums(step, branch.id),
                        tensors=_tensors(session, step, branch.id),
                    )
                    writer.step(branch.id, record)
            for event in session.events():
                writer.event(event.branch, event.step, event.kind, event.text, event.data)
            writer.verdicts(session.verdicts())


def _tensors(session: Session, step: int, branch: int) -> list[TensorRecord]:
    found = (
        session.capture(key.tap, step=step, rank=key.rank, seq=key.seq, branch=branch, slice=key.slice)
        for key in session.captured(step, branch)
    )
    return [tensor for tensor in found if tensor is not None]
