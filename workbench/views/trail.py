"""One pass over the steps of some branches, keeping little of each: 10,000 steps take seconds and little memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sessions import Branch, Session, StepRecord
from sessions.lengths import expected_rows, in_words, odd_lengths


@dataclass(frozen=True, slots=True)
class Odd:
    """Something at one step that must not be: of a sequence, in words."""

    branch: int
    step: int
    words: str


@dataclass(slots=True)
class Trail:
    """What was emitted where. Keys are (branch that recorded the step, step)."""

    branches: Mapping[int, Branch]
    emitted: dict[tuple[int, int], dict[int, int | None]] = field(default_factory=dict)
    misplaced: list[Odd] = field(default_factory=list)  # KV lengths that disagree with the positions
    dropped: list[Odd] = field(default_factory=list)  # what the capture budget left out
    decode_seconds: float = 0.0
    decode_tokens: int = 0

    def owner(self, branch: int, step: int) -> int:
        """The branch that recorded this step of `branch`."""
        line = self.branches[branch]
        while line.parent is not None and step < line.fork_step:
            line = self.branches[line.parent]
        return line.id

    def token(self, branch: int, step: int, seq: int) -> int | None:
        """The token that the sequence emitted at a step; None where it emitted none or took no part."""
        return self.emitted.get((self.owner(branch, step), step), {}).get(seq)

    def first_difference(self, one: int, other: int, steps: Iterable[int], seq: int) -> int | None:
        """The first of `steps` at which two branches emitted different tokens."""
        return next((k for k in steps if self.token(one, k, seq) != self.token(other, k, seq)), None)


def follow(session: Session, branches: Iterable[int]) -> Trail:
    """Read every step of the branches, each once."""
    trail = Trail({branch.id: branch for branch in session.branches()})
    for branch in branches:
        for step in session.steps(branch):
            key = trail.owner(branch, step), step
            if key not in trail.emitted:
                _take(trail, key, session.step(step, branch))
    return trail


def _take(trail: Trail, key: tuple[int, int], record: StepRecord) -> None:
    trail.emitted[key] = {told.seq: told.emitted for told in record.sequences}
    for told in record.sequences:
        odd = odd_lengths(told)
        if odd:
            words = f"sequence {told.seq} has {in_words(odd)}, its positions ask for {expected_rows(told)}"
            trail.misplaced.append(Odd(*key, words))
        if record.phase == "decode" and told.emitted is not None:
            trail.decode_tokens += 1
    if record.phase == "decode":
        trail.decode_seconds += record.wall_seconds
    trail.dropped += [Odd(*key, words) for words in record.dropped]
