"""Whether two sessions did the same work: the same token ids at the same positions."""

from __future__ import annotations

from collections.abc import Sequence

from sessions.errors import IdsMismatch, SessionError
from sessions.records import SequenceStep


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
        for what, left, right in (
            ("token ids", ours[seq].ids, theirs[seq].ids),
            ("positions", ours[seq].positions, theirs[seq].positions),
        ):
            if tuple(left) != tuple(right):
                raise IdsMismatch(_mismatch(step, seq, what, left, right))
    return tuple(seqs)


def _mismatch(step: int, seq: int, what: str, a: Sequence[int], b: Sequence[int]) -> str:
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    values = " and ".join(str(side[at]) if at < len(side) else "nothing" for side in (a, b))
    return (
        f"the {what} differ at step {step}, sequence {seq}, index {at}: {values} (lengths {len(a)} and {len(b)}). "
        "Both sides must be forced onto the same tokens to be compared: record the golden for these ids."
    )
