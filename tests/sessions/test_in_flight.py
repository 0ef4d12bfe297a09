"""The step in flight: what has passed is read like any step's, and the whole step replaces it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions import Session, SessionError
from lockstep.sessions.records import SequenceStep, StepInFlight
from lockstep.sessions.verify import verify
from tests.sessions.samples import create, record


def paused(step: int, place: int) -> StepInFlight:
    """The sample's step, stopped at the tap `place`."""
    whole = record(step)
    assert whole.stats is not None
    assert whole.checksums is not None
    stats, sums = whole.stats.copy(), whole.checksums.copy()
    stats[place + 1 :], sums[place + 1 :] = np.nan, 0
    reported = [SequenceStep(one.seq, one.ids, one.positions, ()) for one in whole.sequences]
    return StepInFlight(step, place, reported, stats, sums, whole.tensors)


def test_what_has_passed_is_read_and_then_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with create(path) as writer:
        writer.step(0, record(0))
        shown, whole = paused(1, 1), record(1)
        writer.in_flight(0, replace(shown, tensors=()))
        writer.in_flight(0, shown)
        with Session.open(path) as session:
            found = session.in_flight()
            assert found is not None
            assert found[0] == 0
            np.testing.assert_array_equal(found[1].stats, shown.stats)
            np.testing.assert_array_equal(found[1].checksums, shown.checksums)
            assert (found[1].step, found[1].place) == (1, 1)
            assert [(list(s.ids), list(s.positions)) for s in found[1].sequences] == [
                (list(s.ids), list(s.positions)) for s in whole.sequences
            ]
            assert session.steps() == range(1), "it is not a step yet"
            assert len(session.captured(1)) == len(whole.tensors)
            one = whole.tensors[0]
            kept = session.capture(one.tap, step=1, rank=one.rank, seq=one.seq, slice=one.slice)
            assert kept is not None
            np.testing.assert_array_equal(kept.array, one.array)
            assert session.stored(one.tap, first=0, stop=2, seq=one.seq).keys() == {0, 1}
            with pytest.raises(SessionError, match="no step 2"):
                session.captured(2)
            assert verify(path) == []
            writer.step(0, replace(whole, tensors=whole.tensors[:1]))
            session.refresh()
            assert session.in_flight() is None
            assert session.steps() == range(2)
            assert len(session.captured(1)) == 1, "what the step keeps is what its record states"
    assert verify(path) == []


def test_an_abandoned_step_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with create(path) as writer:
        writer.in_flight(0, paused(0, 2))
        writer.abandon_flight()
        with Session.open(path) as session:
            assert session.in_flight() is None
            with pytest.raises(SessionError, match="no step 0"):
                session.captured(0)
        writer.step(0, record(0))
    assert verify(path) == []


def test_tensors_are_added_to_the_step_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with create(path) as writer:
        whole = record(0)
        writer.in_flight(0, replace(paused(0, 0), tensors=whole.tensors[:1]))
        writer.tensors(0, 0, whole.tensors)
        with Session.open(path) as session:
            assert len(session.captured(0)) == len(whole.tensors)
        with pytest.raises(ValueError, match="not the next"):
            writer.in_flight(0, paused(3, 0))
    assert verify(path) == []


def test_what_a_killed_run_had_in_flight_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    writer = create(path)
    writer.step(0, record(0))
    writer.in_flight(0, paused(1, 1))
    writer.close()
    with Session.open(path) as session:
        found = session.in_flight()
        assert found is not None
        assert (found[1].step, found[1].place) == (1, 1)
    assert verify(path) == []
