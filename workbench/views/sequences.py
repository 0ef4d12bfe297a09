"""The sequences of a branch: a batch is ragged, and sequences join and leave it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from lockstep.sessions.records import SequenceStep
from lockstep.workbench.words.plain_text import plural


@dataclass(frozen=True, slots=True)
class Sequences:
    """By the number of each sequence the steps from the first to the last that fed it (none: not fed yet)."""

    fed: Mapping[int, range] = field(default_factory=dict)

    @classmethod
    def of(cls, begun: Iterable[int], *fed: Mapping[int, range]) -> Sequences:
        """Of the sequences that the run began with and of those that were fed, of one branch or several."""
        found = dict.fromkeys(begun, range(0))
        for seq, steps in chain.from_iterable(each.items() for each in fed):
            known = found.get(seq) or steps
            found[seq] = range(min(known.start, steps.start), max(known.stop, steps.stop)) if steps else known
        return cls(dict(sorted(found.items())))

    @property
    def several(self) -> bool:
        """Whether it has to be stated which sequence is meant."""
        return len(self.fed) > 1

    @property
    def first(self) -> int:
        """The sequence that is meant until another is chosen."""
        return next(iter(self.fed), 0)

    def label(self, seq: int) -> str:
        """ "seq 1 of 3", "" where there is only one."""
        return f"seq {seq} of {len(self.fed)}" if self.several else ""

    def beside(self, seq: int, by: int) -> int:
        """The sequence `by` places on, around the end."""
        known = list(self.fed) or [seq]
        return known[(known.index(seq) + by) % len(known)] if seq in known else known[0]

    def why_absent(self, seq: int, step: int) -> str:
        """Why a step that did not feed the sequence did not, as far as that is known."""
        fed = self.fed.get(seq)
        where = f"sequence {seq} is not in step {step}"
        if fed is None:
            return f"there is no sequence {seq}: {self.listed()}"
        if not fed:
            return f"{where}: it was not fed yet"
        if step < fed.start:
            return f"{where}: it joins the batch at step {fed.start}"
        return f"{where}: its last was step {fed.stop - 1}" if step >= fed.stop else where

    def listed(self) -> str:
        """ "sequences are 0, 1 and 2"."""
        known = [str(seq) for seq in self.fed]
        if len(known) < 2:
            return f"there is only sequence {self.first}"
        more = f" and {len(known) - 16} more" if len(known) > 16 else f" and {known.pop()}"
        return f"sequences are {', '.join(known[:16])}{more}"


def of_all(sequences: int) -> str:
    """ "of all 3 sequences": what is added to a figure that a whole batch shares, "" where it has only one."""
    return f"of all {plural(sequences, 'sequence')}" if sequences > 1 else ""


def fed(recorded: SequenceStep | None) -> bool:
    """Whether a step gave the sequence tokens to read."""
    return recorded is not None and bool(len(recorded.ids)) and bool(len(recorded.positions))
