"""Which rows of a recording are wrong on their own inputs: the noise floor that diagnosis has for every operation."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.engine.graph.operation import OF_POSITIONS
from lockstep.engine.taps.flow import is_known
from lockstep.engine.taps.names import operation_at
from lockstep.sessions import Session
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.site import Unjudged
from lockstep.workbench.diagnosis.operations.sites import sites_of
from lockstep.workbench.diagnosis.recording import Recording
from lockstep.workbench.diagnosis.row_comparison import Place


@dataclass(frozen=True, slots=True)
class RowJudge:
    """One recording, by the checkpoint's weights. Each operation is looked at when it is asked for; what was found is
    kept in `known`."""

    taps: RecordedTaps
    facts: Facts
    known: dict[str, frozenset[Place] | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls, session: Session, facts: Facts, known: dict[str, frozenset[Place] | None] | None = None
    ) -> RowJudge:
        """Of the first branch; `known` from an earlier one of the same recording."""
        return cls(RecordedTaps(Recording(session)), facts, {} if known is None else known)

    def wrong(self, tap: str) -> frozenset[Place] | None:
        """The rows (sequence, position as counted) at which the operation is wrong on some rank, of a cache those that
        read it; None where it cannot be judged on all of them."""
        if tap not in self.known:
            self.known[tap] = self._judged(tap) if self.taps.has(tap) and is_known(tap) else None
        return self.known[tap]

    def _judged(self, tap: str) -> frozenset[Place] | None:
        found: set[Place] = set()
        for site in sites_of(tap, self.taps, self.facts):
            if isinstance(site, Unjudged):
                return None
            if site.deviation is None:
                continue
            if is_cache(tap):
                wrong = site.wrong_passes
                rows = [row for one in self.taps.passes if (one.step, one.seq) in wrong for row in one.rows]
            else:
                rows = list(site.deviation.rows)
            found |= {(row.seq, row.position) for row in rows}
        return frozenset(found)


def is_cache(tap: str) -> bool:
    """Whether the tap holds a row for each position that is attended to."""
    operation = operation_at(tap)
    return operation is not None and operation.form in OF_POSITIONS
