"""When the host's patience with ranks that report no progress is over (torch-free)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.engine.ranks.hangs import RankTrace, waited_for
from lockstep.engine.ranks.vitals import Vitals, Waiting

#: How many times its patience the host has with a rank that computes: a loop without an end computes as well.
MOST_SLOW = 10
#: Seconds without progress after which the ranks' processes are looked at: a step that goes well costs no look.
_LOOK_AFTER = 1.0


class Patience:
    """`seconds` without progress (None: for ever) and a rank is hung; but as long as the rank that the others wait for
    computes or reads from a disk it is only slow, up to `MOST_SLOW` times as long. One whose process is stopped is not
    slow: `stopped` seconds are enough, where that is less. `look` reports on all ranks."""

    def __init__(
        self, seconds: float | None, look: Callable[[], Sequence[RankTrace]], stopped: float | None = None
    ) -> None:
        self.seconds, self._look = seconds, look
        self._stopped = seconds if stopped is None else stopped
        self._looked = 0.0
        #: Seconds waited when a rank was first seen stopped, without a break.
        self._still_since: float | None = None
        #: For how many seconds a rank that the others wait for has been seen stopped.
        self.stopped_for = 0.0
        self._waiting = Waiting()
        self._progress = -1
        self._rounds = 0
        self._before: list[Vitals] = []
        self._since = 0.0

    def over(self, progress: int) -> bool:
        """Whether it is; to be asked several times a second, with a number that changes with all progress."""
        if progress != self._progress:
            self._progress, self._rounds = progress, 0
            self._again()
        waited = self._waiting.look()
        self._look_for_stopped(waited)
        if self.seconds is None:
            return False
        if not self._before and waited > min(_LOOK_AFTER, self.seconds / 2):
            self._before, self._since = [trace.vitals for trace in self._look()], waited
        if waited <= self.seconds:
            return self._stopped is not None and self.stopped_for >= self._stopped
        self._rounds += 1
        if self._rounds >= MOST_SLOW or not self._at_work(waited - self._since):
            return True
        self._again()
        return False

    @property
    def spent(self) -> float:
        """The seconds that are over: of both patiences the one that is."""
        whole = self.seconds is not None and self._waiting.seconds > self.seconds
        return (self.seconds if whole else self._stopped) or 0.0

    def _look_for_stopped(self, waited: float) -> None:
        """Note for how long a rank that the others wait for has been stopped."""
        pause = _LOOK_AFTER if self._stopped is None else min(_LOOK_AFTER, self._stopped / 2)
        if waited - self._looked < pause:
            return
        self._looked = waited
        if not any(trace.vitals.stopped for trace in waited_for(self._look())):
            self._still_since = None
        elif self._still_since is None:
            self._still_since = waited
        self.stopped_for = 0.0 if self._still_since is None else waited - self._still_since

    def _at_work(self, seconds: float) -> bool:
        return any(
            trace.vitals.at_work(self._before[trace.rank], seconds) for trace in waited_for(self._look())
        )

    def _again(self) -> None:
        self._waiting.restart()
        self._before, self._looked, self._still_since, self.stopped_for = [], 0.0, None, 0.0
