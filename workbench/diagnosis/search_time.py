"""The time that the search for causes has: what it takes depends on what was computed wrongly, not on how much was
recorded, so it is no matter of what reading a session may cost."""

from __future__ import annotations

import time

#: Seconds after which no further hypothesis is tried, unless another limit is given.
SEARCH_SECONDS = 600.0
#: Seconds that judging goes on after that.
JUDGING_SECONDS = 600.0


class SearchEnded(Exception):
    """The time is over; what was found by then stands."""


class SearchTime:
    """Begins now. Operations are judged on when it is over: where something is wrong is worth more than why."""

    def __init__(self, seconds: float = SEARCH_SECONDS) -> None:
        self.seconds, self._begun = seconds, time.monotonic()

    def check(self) -> None:
        """`SearchEnded` when no further hypothesis is to be tried."""
        self._check(self.seconds)

    def check_judging(self) -> None:
        """`SearchEnded` when no further operation is to be judged."""
        self._check(self.seconds + JUDGING_SECONDS)

    @property
    def over(self) -> bool:
        """Whether nothing further is to be tried."""
        return self.spent > self.seconds

    @property
    def spent(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._begun

    def _check(self, seconds: float) -> None:
        if self.spent > seconds:
            raise SearchEnded(
                f"the search for causes has ended after {seconds:g} s (`--search-seconds` gives it more)"
            )
