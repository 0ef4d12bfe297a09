"""What is measured of the reference flows to all runs that are held against it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.sessions import Session
from lockstep.sessions.layouts import Rebuilt
from lockstep.workbench.diagnosis import measure
from lockstep.workbench.diagnosis.compare import compare
from lockstep.workbench.diagnosis.measure import Recordings
from lockstep.workbench.diagnosis.recording import Recording
from tests.workbench.diagnosis.synthetic import Case, synthetic


def test_the_reference_is_measured_once_for_all_runs(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Recording] = []

    def counting(engine: Recording, *place: Any) -> Any:
        compared.append(engine)
        return compare(engine, *place)

    read: list[str] = []

    def rebuilt(session: Session, tap: str, **place: Any) -> Rebuilt:
        if session is case.golden:
            read.append(tap)
        return rebuild(session, tap, **place)

    rebuild = Session.rebuilt
    monkeypatch.setattr(Session, "rebuilt", rebuilt)
    monkeypatch.setattr(measure, "compare", counting)
    with (
        synthetic(tmp_path / "a.session", case.floor) as one,
        synthetic(tmp_path / "b.session", case.floor, skip=lambda tap: tap != "logits") as other,
    ):
        sides = Recordings.of(one, case.golden, case.floor)
        first = list(measure.measure(sides))
        alone = list(measure.measure(Recordings.of(other, case.golden, case.floor)))
        assert len(set(read)) > 1
        compared.clear()
        read.clear()
        again = list(measure.measure(sides.held(other)))
    assert set(read) == {"logits"}, "no other golden tensor is needed"
    assert {id(side.session) for side in compared} == {id(other)}
    assert repr(again) == repr(alone)  # repr, because NaN differs from itself
    assert [(place.noise, place.largest) for place in again] == [
        (place.noise, place.largest) for place in first
    ]
