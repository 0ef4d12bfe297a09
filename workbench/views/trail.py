"""One pass over the steps of some branches, keeping little of each: 10,000 steps take seconds and little memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.sessions import Session, StepRecord
from lockstep.sessions.errors import SessionDamaged
from lockstep.workbench.views.sentinels import SentinelFinding, misaligned


@dataclass(slots=True)
class Trail:
    """What was emitted where. Keys are (branch that recorded the step, step)."""

    session: Session
    emitted: dict[tuple[int, int], dict[int, int | None]] = field(default_factory=dict)
    misaligned: dict[tuple[int, int], SentinelFinding] = field(default_factory=dict)
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    damaged: dict[tuple[int, int], str] = field(default_factory=dict)  # why a step cannot be read

    def token(self, branch: int, step: int, seq: int) -> int | None:
        """The token that the sequence emitted at a step; None where it emitted none or took no part."""
        return self.emitted.get((self.session.owner(step, branch), step), {}).get(seq)


def follow(session: Session, branches: Iterable[int]) -> Trail:
    """Read every step of the branches, each once."""
    trail = Trail(session)
    for branch in branches:
        for step in session.steps(branch):
            key = session.owner(step, branch), step
            if key not in trail.emitted:
                try:
                    _take(trail, key, session.step(step, branch))
                except SessionDamaged as error:
                    trail.emitted[key] = {}
                    trail.damaged[key] = str(error)
    return trail


def _take(trail: Trail, key: tuple[int, int], record: StepRecord) -> None:
    trail.emitted[key] = {reported.seq: reported.emitted for reported in record.sequences}
    found = misaligned(trail.session, record.sequences)
    if found is not None:
        trail.misaligned[key] = found
    if record.phase == "decode":
        trail.decode_seconds += record.wall_seconds
        trail.decode_tokens += sum(reported.emitted is not None for reported in record.sequences)
