"""Whose rows of a cache the requests of one run read, and what its logits chose: what there is to know of a run beside
its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from lockstep.workbench.diagnosis.cache_causes import shows
from lockstep.workbench.diagnosis.row_comparison import Place
from lockstep.workbench.diagnosis.row_sides import RowSide
from lockstep.workbench.views.provenance.findings import CacheFinding, cache_audit, cache_passes
from lockstep.workbench.views.provenance.ledger import Misuse, WrongAccess


@dataclass(frozen=True, slots=True)
class CacheEvidence:
    """The wrong accesses of one run, of the same reason together, and with how many rows of the prefix cache a request
    begins (`taken`). Places are the run's own."""

    findings: tuple[CacheFinding, ...] = ()
    taken: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, side: RowSide) -> CacheEvidence:
        """Nothing where the run does not report where its rows lie."""
        audit = cache_audit(side.session, side.branch)
        if audit is None or audit.lacking:
            return cls()
        passes = cache_passes(
            side.session, side.session.meta.foreign.ranks[0] if side.session.meta.foreign else 0
        )
        return cls(audit.findings, {seq: len(tokens) for one in passes for seq, tokens in one.cached.items()})

    def at(self, tap: str, places: set[Place]) -> tuple[CacheFinding, ...]:
        """What explains that the operation is wrong at those places: of each finding the accesses that these rows
        make."""
        found = []
        for one in self.findings:
            if not shows(one.kind, tap):
                continue
            met = tuple(access for access in one.accesses if any(_reads(access, place) for place in places))
            if met:
                found.append(replace(one, accesses=met))
        return tuple(found)

    def behind(self, place: Place, *, cut: bool = False) -> Iterator[CacheFinding]:
        """Accesses of the request before that place; of a request that is `cut` off there, which has no rows from there
        on, those behind it."""
        seq, at = place
        for one in self.findings:
            met = tuple(
                access for access in one.accesses if access.request == seq and (access.stop > at) == cut
            )
            if met:
                yield replace(one, accesses=met)


def _reads(access: WrongAccess, place: Place) -> bool:
    """Whether the row at that place is of the pass that makes the access, and reads what is wrong."""
    seq, at = place
    among = access.start <= at < access.stop and seq == access.request
    return among and (access.kind == Misuse.LENGTH or at >= access.places[0])


def blocks_of(findings: tuple[CacheFinding, ...]) -> tuple[int, ...]:
    """The blocks that are met, in order."""
    return tuple(
        dict.fromkeys(access.block for one in findings for access in one.accesses if access.slot >= 0)
    )


def chosen(side: RowSide, seq: int, at: int) -> int | None:
    """What the logits before position `at` chose, decoded greedily; None where there are none."""
    if at - 1 not in side.sequences[seq] or "tensor" not in side.kinds("logits"):
        return None
    row = side.rows("logits", "tensor", seq, [at - 1]).get(at - 1)
    return None if row is None else int(np.argmax(row))


def is_greedy(side: RowSide, seq: int, stop: int) -> bool:
    """Whether each token before position `stop` is what the logits before it chose, where there are any."""
    reported = [
        (row.token, choice)
        for at, row in side.sequences[seq].items()
        if 0 < at < stop and (choice := chosen(side, seq, at)) is not None
    ]
    return all(token == choice for token, choice in reported)
