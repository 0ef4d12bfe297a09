"""What a rank notes of what it does (torch-free): tap by tap, and where it enters and leaves each collective."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class OpKind(IntEnum):
    """What a rank does; `Note.place` is a tap where nothing else is reported."""

    START = 0  # nothing was noted yet
    TAP = 1
    ALL_REDUCE = 2
    GATHER = 3
    BROADCAST = 4
    AGREEMENT = 5  # whether any rank is to pause
    RENDEZVOUS = 6
    SEND = 7  # point to point: the place is the other rank
    RECEIVE = 8
    LOADING = 9  # the place counts the tensors that were read
    PAUSED = 10
    COMMAND = 11  # a command was taken
    ANSWER = 12  # it is being answered
    IDLE = 13  # it was answered


#: What all ranks do together, in the same order.
COLLECTIVES = frozenset(
    {OpKind.ALL_REDUCE, OpKind.GATHER, OpKind.BROADCAST, OpKind.AGREEMENT, OpKind.RENDEZVOUS}
)


@dataclass(frozen=True, slots=True)
class Note:
    """One operation of a rank: its number, what it is and in which step, how many collectives the rank has entered by
    then, and whether it is inside a collective or a transfer."""

    number: int
    kind: OpKind
    step: int
    place: int
    collectives: int
    inside: bool


#: Where a rank stands before it has noted anything.
UNSTARTED = Note(0, OpKind.START, 0, 0, 0, False)
