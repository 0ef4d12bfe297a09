"""When ranks that report no progress are hung, by a clock and processes of the test's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lockstep.engine.parallel.operations import Note, OpKind
from lockstep.engine.ranks import vitals
from lockstep.engine.ranks.hangs import RankTrace
from lockstep.engine.ranks.patience import MOST_SLOW, Patience
from lockstep.engine.ranks.vitals import Vitals, Waiting

SECONDS = 60.0


class Ranks:
    """Rank 0 waits in an all-reduce that rank 1 has not entered; each uses its share of a processor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shares: tuple[float, float]) -> None:
        self.now, self.progress, self.shares, self.state = 1000.0, 0, shares, "sleeping"
        monkeypatch.setattr(vitals, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.patience = Patience(SECONDS, self.look)

    def look(self) -> list[RankTrace]:
        used = [share * self.now for share in self.shares]
        inside = Note(9, OpKind.ALL_REDUCE, 0, 3, 5, True)
        outside = Note(8, OpKind.TAP, 0, 3, 4, False)
        return [
            RankTrace(0, [inside], Vitals(10, "sleeping", used[0]), False),
            RankTrace(1, [outside], Vitals(11, self.state, used[1]), False),
        ]

    def waits(self, most: float = 5000.0) -> float:
        """Seconds until they count as hung; `most` where they do not."""
        began = self.now
        while not self.patience.over(self.progress):
            self.now += 0.1
            if self.now - began >= most:
                return most
        return self.now - began


@pytest.mark.parametrize(
    ("shares", "rounds"),
    [
        ((0.0, 0.0), 1),
        ((1.0, 0.0), 1),  # the one that waits may spin, as NCCL does
        ((0.0, 0.005), 1),  # a watchdog thread is no work
        ((0.0, 0.05), MOST_SLOW),  # on an overloaded machine a rank gets a twentieth of a processor
        ((0.0, 1.0), MOST_SLOW),  # a loop without an end
    ],
)
def test_the_rank_that_is_waited_for_decides(
    monkeypatch: pytest.MonkeyPatch, shares: tuple[float, float], rounds: int
) -> None:
    assert Ranks(monkeypatch, shares).waits() == pytest.approx(rounds * SECONDS, abs=2)


@pytest.mark.parametrize(
    ("state", "rounds"), [("stopped", 1), ("running", MOST_SLOW), ("disk-sleep", MOST_SLOW)]
)
def test_the_state_of_its_process_counts(monkeypatch: pytest.MonkeyPatch, state: str, rounds: int) -> None:
    ranks = Ranks(monkeypatch, (0.0, 0.0))
    ranks.state = state
    assert ranks.waits() == pytest.approx(rounds * SECONDS, abs=2)


@pytest.mark.parametrize(
    ("state", "seconds"),
    [("stopped", 5), ("tracing-stop", 5), ("sleeping", SECONDS), ("running", MOST_SLOW * SECONDS)],
)
def test_one_that_is_stopped_is_not_slow(monkeypatch: pytest.MonkeyPatch, state: str, seconds: float) -> None:
    """While ranks start and load, there is more patience with what computes or waits than with what is stopped."""
    ranks = Ranks(monkeypatch, (1.0, 0.0))
    ranks.patience, ranks.state = Patience(SECONDS, ranks.look, 5.0), state
    assert ranks.waits() == pytest.approx(seconds, abs=2)
    assert ranks.patience.spent == (5 if seconds == 5 else SECONDS)


def test_one_that_is_stopped_for_a_moment_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, (1.0, 0.0))
    ranks.patience, ranks.state = Patience(SECONDS, ranks.look, 5.0), "stopped"
    assert ranks.waits(4) == 4
    ranks.state = "running"
    assert ranks.waits(30) == 30
    ranks.state = "stopped"
    assert ranks.waits() == pytest.approx(5, abs=2)


def test_for_how_long_one_is_stopped_is_known_without_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, (1.0, 0.0))
    ranks.patience, ranks.state = Patience(None, ranks.look), "stopped"
    ranks.waits(10)
    assert ranks.patience.stopped_for == pytest.approx(10, abs=2)
    ranks.state = "running"
    ranks.waits(2)
    assert ranks.patience.stopped_for == 0


def test_progress_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, (0.0, 0.0))
    for _ in range(5):
        assert ranks.waits(50) == 50
        ranks.progress += 1
    assert ranks.waits() == pytest.approx(SECONDS, abs=2)


def test_no_limit_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, (0.0, 0.0))
    ranks.patience.seconds = None
    assert ranks.waits(5000) == 5000


def test_time_that_this_process_was_stopped_for_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(vitals, "time", SimpleNamespace(monotonic=lambda: clock.now))
    waiting = Waiting()
    clock.now += 0.5
    assert waiting.look() == 0.5
    clock.now += 3600
    assert waiting.look() == 1.5
    waiting.restart()
    clock.now += 0.25
    assert waiting.look() == 0.25
