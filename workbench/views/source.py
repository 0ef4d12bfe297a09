"""A session as the snapshots read it: with the arrays of recent steps kept, and token ids turned to text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.errors import SessionDamaged, SessionError
from lockstep.sessions.layouts import Rebuilt
from lockstep.sessions.meta import SessionMeta
from lockstep.sessions.records import SequenceStep, StepInFlight, StepRecord
from lockstep.sessions.session import Session
from lockstep.workbench.judgements.golden_event import last_golden_event
from lockstep.workbench.paths import golden_directory
from lockstep.workbench.views.sequences import Sequences
from lockstep.workbench.views.token_texts import TokenTexts, checkpoint_path
from lockstep.workbench.views.where import Where

#: Bytes of rebuilt tensors that are kept: the attention rows of the steps that a pane shows under each other.
_KEPT_BYTES = 8 << 20
#: Steps of which is kept what happened: somewhat more than attention goes back. A long text's have long block tables.
_KEPT_RECORDS = 320
#: Steps whose statistics are kept: as many as the widest sparkline shows, a few times over.
_KEPT = 256


class SessionSource:
    """What one session answers. Used from one thread only."""

    def __init__(self, session: Session, texts: TokenTexts | None = None) -> None:
        self.session = session
        self.texts = texts or TokenTexts.of(session.meta)
        self._golden: dict[int, SessionSource | None] = {}
        self._opened: dict[Path, SessionSource] = {}
        self._stats: OrderedDict[tuple[int, int], NDArray[np.float32] | None] = OrderedDict()
        self._records: OrderedDict[tuple[int, int], StepRecord] = OrderedDict()
        self._rebuilt: OrderedDict[tuple[Hashable, ...], Rebuilt] = OrderedDict()
        self._rebuilt_bytes = 0
        self._fed: dict[int, tuple[dict[int, range], int]] = {}  # by branch: its batch, before a step
        session.meter.register(self)

    def forget(self) -> None:
        """Let go of what is kept for the next question: the room is needed."""
        for kept in (self._stats, self._records, self._rebuilt):
            kept.clear()
        self._rebuilt_bytes = 0

    @property
    def meta(self) -> SessionMeta:
        """What the session states of itself."""
        return self.session.meta

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.session.path

    @property
    def model_path(self) -> Path | None:
        """The checkpoint that the session was made from, if it is on this machine. "demo" is the embedded model."""
        return checkpoint_path(self.meta)

    def stats(self, step: int, branch: int) -> NDArray[np.float32] | None:
        """Statistics [taps, ranks, 8] of a step, kept for the neighbouring questions."""
        key = (branch, step)
        found = self._stats.pop(key) if key in self._stats else self.session.stats(step, branch)
        self._stats[key] = found  # as the newest
        if len(self._stats) > _KEPT:
            self._stats.popitem(last=False)
        return found

    def under_way(self, branch: int, step: int) -> StepInFlight | None:
        """The step of a branch, where it stands still in its middle; None for one that is over, or not begun."""
        if step != self.session.steps(branch).stop:
            return None  # known without asking the file: this is called for every token of a branch
        found = self.session.in_flight()
        return found[1] if found is not None and (found[0], found[1].step) == (branch, step) else None

    def passed(self, where: Where, tap: str = "") -> Where:
        """`where`, or the step before it where that one is under way and has not come to the tap (none: to its end)."""
        flight = self.under_way(where.branch, where.step)
        if flight is None or (self.session.has_tap(tap) and self.session.tap(tap).index <= flight.place):
            return where
        return replace(where, step=where.step - 1)

    def reach(self, branch: int) -> range:
        """The steps of a branch that can be looked at: those recorded, and the one that is under way."""
        steps = self.session.steps(branch)
        return steps if self.under_way(branch, steps.stop) is None else range(steps.start, steps.stop + 1)

    def record(self, step: int, branch: int) -> StepRecord:
        """What happened at a step."""
        key = (branch, step)
        found = self._records.pop(key) if key in self._records else self.session.step(step, branch)
        self._records[key] = found  # as the newest
        if len(self._records) > _KEPT_RECORDS:
            self._records.popitem(last=False)
        return found

    def width(self, step: int, branch: int) -> int:
        """How many sequences a step fed; 1 where that is damaged, or not stated."""
        try:
            return max(1, len(self.record(step, branch).sequences))
        except SessionDamaged:
            return 1

    def sequence(self, step: int, branch: int, seq: int) -> SequenceStep | None:
        """What a step did to one sequence, or what it reads while it is under way; None if it takes no part."""
        reported = self.under_way(branch, step) or self.record(step, branch)
        return next((s for s in reported.sequences if s.seq == seq), None)

    def batch(self, branch: int) -> Sequences:
        """The sequences of a branch. What it had before is not read again."""
        steps = self.session.steps(branch)
        known, stop = self._fed.get(branch, ({}, steps.start))
        if stop < steps.stop:
            new = self.session.sequences(branch, start=stop)
            begins = {seq: known[seq].start if seq in known else fed.start for seq, fed in new.items()}
            known = {**known, **{seq: range(begins[seq], fed.stop) for seq, fed in new.items()}}
            self._fed[branch] = known, steps.stop
        flight = self.under_way(branch, steps.stop)
        fed = (
            {reported.seq: range(steps.stop, steps.stop + 1) for reported in flight.sequences}
            if flight
            else {}
        )
        return Sequences.of(self.meta.sequences, {**fed, **known})

    def why_absent(self, where: Where) -> str:
        """Why the step did not feed the sequence, "" where it did, or where there is only one."""
        batch = self.batch(where.branch)
        if not batch.several or self.sequence(where.step, where.branch, where.seq) is not None:
            return ""
        return batch.why_absent(where.seq, where.step)

    def back_from(self, tap: str, where: Where, first: int) -> Iterator[tuple[int, Rebuilt]]:
        """(step, the tap rebuilt) from `where` back to step `first`; what was read before is not read again."""
        stored = self.session.stored(
            tap, first=first, stop=where.step + 1, seq=where.seq, branch=where.branch
        )
        for step in range(where.step, first - 1, -1):
            key = (tap, step, where.branch, where.seq, stored.get(step))
            found = self._rebuilt.get(key)
            if found is None:
                found = self.session.rebuilt(tap, step=step, seq=where.seq, branch=where.branch)
                self._keep(key, found)
            yield step, found

    def _keep(self, key: tuple[Hashable, ...], found: Rebuilt) -> None:
        self._rebuilt[key] = found
        self._rebuilt_bytes += _size(found)
        while self._rebuilt_bytes > _KEPT_BYTES:
            self._rebuilt_bytes -= _size(self._rebuilt.popitem(last=False)[1])

    def golden(self, where: Where) -> SessionSource | None:
        """The golden reference that the branch was last held against, if it is on this machine and read the same
        ids up to this step."""
        found = self.reference(where.branch)
        if found is None or where.step not in found.session.steps(0):
            return None
        ours, theirs = (
            self.sequence(where.step, where.branch, where.seq),
            found.sequence(where.step, 0, where.seq),
        )
        same = ours is not None and theirs is not None and list(ours.ids) == list(theirs.ids)
        return found if same else None

    def reference(self, branch: int) -> SessionSource | None:
        """The golden reference that the branch was last held against, if it is on this machine."""
        if branch not in self._golden:
            self._golden[branch] = self._find_golden(branch)
        return self._golden[branch]

    def _find_golden(self, branch: int) -> SessionSource | None:
        event = last_golden_event(self.session, branch)
        # A name, not a path: a session from elsewhere opens nothing but what was recorded for this machine.
        name = Path(event.golden_session).name if event is not None else ""
        if not name:
            return None
        for directory in (self.path.parent, golden_directory()):
            path = directory / name
            if path not in self._opened and path.is_file():
                try:
                    self._opened[path] = SessionSource(
                        Session.open(path, self.session.meter.limits), self.texts
                    )
                except SessionError:
                    continue  # the verdicts are in this session; only the differences are not to be had
            if path in self._opened:
                return self._opened[path]
        return None

    def refresh(self) -> bool:
        """Take notice of what was written since; whether there was anything."""
        if not self.session.refresh():
            return False
        self._golden.clear()  # there may be a newer one
        self._stats = OrderedDict((key, kept) for key, kept in self._stats.items() if kept is not None)
        return True

    def move(self, path: Path) -> None:
        """The run is recorded on at `path`, with all that it had."""
        before, self.session = self.session, Session.open(path, self.session.meter.limits, follow=False)
        before.close()

    def close(self) -> None:
        """Let go of the files."""
        for golden in self._opened.values():
            golden.close()
        self.session.close()


def _size(rebuilt: Rebuilt) -> int:
    return 256 + (rebuilt.array.nbytes if rebuilt.array is not None else 0)
