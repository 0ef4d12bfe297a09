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
class JudgedRows:
    """The rows (sequence, position as counted) at which an operation could be judged, and those at which it is wrong on
    some rank; of a cache those that read it."""

    judged: frozenset[Place]
    wrong: frozenset[Place]


#: What was found of each tap; None where nothing of it can be judged.
KnownRows = dict[str, JudgedRows | None]


@dataclass(frozen=True, slots=True)
class RowJudge:
    """One recording, by the checkpoint's weights. Each operation is looked at when it is asked for; what was found is
    kept in `known`."""

    taps: RecordedTaps
    facts: Facts
    known: KnownRows = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session, facts: Facts, known: KnownRows | None = None) -> RowJudge:
        """Of the first branch; `known` from an earlier one of the same recording."""
        return cls(RecordedTaps(Recording(session)), facts, {} if known is None else known)

    def rows(self, tap: str) -> JudgedRows | None:
        """The rows at which the operation is right and wrong; None where it cannot be judged on all ranks."""
        if tap not in self.known:
            self.known[tap] = self._judged(tap) if self.taps.has(tap) and is_known(tap) else None
        return self.known[tap]

    def _judged(self, tap: str) -> JudgedRows | None:
        wrong: set[Place] = set()
        judged: set[Place] | None = None
        for site in sites_of(tap, self.taps, self.facts):
            if isinstance(site, Unjudged):
                return None
            seen = {(row.seq, row.position) for i in site.passes for row in self.taps.passes[i].rows}
            judged = seen if judged is None else judged & seen
            if site.deviation is None:
                continue
            if is_cache(tap):
                passes = site.wrong_passes
                rows = [row for one in self.taps.passes if (one.step, one.seq) in passes for row in one.rows]
            else:
                rows = list(site.deviation.rows)
            wrong |= {(row.seq, row.position) for row in rows}
        return JudgedRows(frozenset(judged or ()), frozenset(wrong))


def is_cache(tap: str) -> bool:
    """Whether the tap holds a row for each position that is attended to."""
    operation = operation_at(tap)
    return operation is not None and operation.form in OF_POSITIONS
