"""Whether two sessions did the same work: the same token ids at the same positions."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.sessions.errors import IdsMismatch, SessionError
from lockstep.sessions.records import SequenceStep


def matched_sequences(
    step: int, a: Sequence[SequenceStep], b: Sequence[SequenceStep], wanted: Sequence[int] | None
) -> tuple[int, ...]:
    """The sequences of a step to compare (default: those on both sides).

    `IdsMismatch` where one was fed differently, `SessionError` where a wanted one is missing.
    """
    ours, theirs = {one.seq: one for one in a}, {one.seq: one for one in b}
    seqs = sorted(ours.keys() & theirs.keys()) if wanted is None else wanted
    for seq in seqs:
        if seq not in ours or seq not in theirs:
            raise SessionError(
                f"sequence {seq} is not on both sides at step {step}: one has {sorted(ours)}, "
                f"the other {sorted(theirs)}. Name sequences that both have."
            )
        mismatch = input_mismatch(ours[seq], theirs[seq])
        if mismatch:
            raise IdsMismatch(
                f"{mismatch[0]} differ at step {step}, sequence {seq}, {mismatch[1]}. Both sides must be forced onto "
                "the same tokens to be compared: record the golden for these ids."
            )
    return tuple(seqs)


def input_mismatch(a: SequenceStep, b: SequenceStep) -> tuple[str, str] | None:
    """What goes into a step on two sides that is not the same, and where; None where all is."""
    for what, left, right in (
        ("the token ids", a.ids, b.ids),
        ("the positions", a.positions, b.positions),
    ):
        if tuple(left) != tuple(right):
            at = next(
                (i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y),
                min(len(left), len(right)),
            )
            values = " and ".join(str(side[at]) if at < len(side) else "nothing" for side in (left, right))
            return what, f"index {at}: {values} (lengths {len(left)} and {len(right)})"
    return None
