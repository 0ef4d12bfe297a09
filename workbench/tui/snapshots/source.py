"""A session as the snapshots read it: with the arrays of recent steps kept, and token ids turned to text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sessions.errors import SessionError
from sessions.reader import Session
from sessions.records import SequenceStep, StepRecord
from workbench.tui.snapshots.texts import TokenTexts, model_path

#: Steps whose statistics are kept: as many as the widest sparkline shows, a few times over.
_KEPT = 256


class Source:
    """What one session answers. Used from one thread only."""

    def __init__(self, session: Session, texts: TokenTexts | None = None) -> None:
        self.session = session
        self.texts = texts or TokenTexts.of(session.meta)
        #: The golden reference that was recorded for the same token ids, where there is one.
        self.golden: Source | None = None
        self._stats: OrderedDict[tuple[int, int], NDArray[np.float32] | None] = OrderedDict()
        self._records: OrderedDict[tuple[int, int], StepRecord] = OrderedDict()

    @property
    def meta(self) -> Mapping[str, Any]:
        """The session's meta table."""
        return self.session.meta

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.session.path

    @property
    def model_path(self) -> Path | None:
        """The checkpoint that the session was made from, if it is on this machine. "demo" is the embedded model."""
        return model_path(self.meta)

    def owner(self, step: int, branch: int) -> int:
        """The branch that ran a step of `branch`: itself, or the one it shares the step with."""
        known = {one.id: one for one in self.session.branches()}
        while step < known[branch].fork_step and (parent := known[branch].parent) is not None:
            branch = parent
        return branch

    def stats(self, step: int, branch: int) -> NDArray[np.float32] | None:
        """Statistics [taps, ranks, 8] of a step, kept for the neighbouring questions."""
        key = (branch, step)
        if key not in self._stats:
            self._stats[key] = self.session.stats(step, branch)
            if len(self._stats) > _KEPT:
                self._stats.popitem(last=False)
        self._stats.move_to_end(key)
        return self._stats[key]

    def record(self, step: int, branch: int) -> StepRecord:
        """What happened at a step."""
        key = (branch, step)
        if key not in self._records:
            self._records[key] = self.session.step(step, branch)
            if len(self._records) > 4 * _KEPT:
                self._records.popitem(last=False)
        self._records.move_to_end(key)
        return self._records[key]

    def sequence(self, step: int, branch: int, seq: int) -> SequenceStep | None:
        """What a step did to one sequence; None if it took no part."""
        return next((s for s in self.record(step, branch).sequences if s.seq == seq), None)

    def attach_golden(self) -> bool:
        """Open the golden reference that the newest comparison used, if it is on this machine."""
        events = self.session.events(kind="golden")
        data = events[-1].data if events else None
        path = data.get("golden_session") if isinstance(data, dict) else None
        if not isinstance(path, str) or not Path(path).is_file():
            return False
        if self.golden is None or self.golden.path != Path(path):
            try:
                opened = Session.open(Path(path))
            except SessionError:
                return False  # the verdicts are in this session; only the differences are not to be had
            if self.golden is not None:
                self.golden.close()
            self.golden = Source(opened, self.texts)
        return True

    def refresh(self) -> bool:
        """Take notice of what was written since; whether there was anything."""
        if not self.session.refresh():
            return False
        self._stats = OrderedDict((key, kept) for key, kept in self._stats.items() if kept is not None)
        return True

    def close(self) -> None:
        """Let go of the files."""
        if self.golden is not None:
            self.golden.close()
        self.session.close()
