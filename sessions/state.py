"""What state a recording is in, as far as the file and the lock beside it show."""

from __future__ import annotations

from typing import Literal

from lockstep.sessions.format import log_owner
from lockstep.sessions.lock import holder
from lockstep.sessions.session import Session

State = Literal["closed", "recording", "interrupted", "incomplete", "damaged"]

#: The states in words.
STATE_WORDS: dict[State, str] = {
    "closed": "closed",
    "recording": "being recorded",
    "interrupted": "ended without closing",
    "incomplete": "incomplete",
    "damaged": "damaged",
}


def state_of(session: Session) -> State:
    """ "closed" by its writer; "recording": somebody is writing it; "interrupted": its writer was killed, all that it
    committed is there; "incomplete": see `Session.missing`; "damaged": see `Session.losses`."""
    if session.missing:
        return "incomplete"
    if session.losses:
        return "damaged"
    if holder(session.path):
        return "recording"
    return "interrupted" if session.growing else "closed"


def foreign_log(session: Session) -> str:
    """ "NAME-wal is the log of another session …" where one lies beside the file, and is not read; else ""."""
    return log_owner.foreign_log(session.path)
