"""Recording on a disk that fills up at any point: what fits is there, the rest waits, then is counted as lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.sessions import Session, SessionWriteError
from lockstep.sessions.errors import RecordingLost
from lockstep.sessions.verify import verify
from lockstep.workbench.inferior import backlog
from lockstep.workbench.inferior.recorder import StepRecorder
from lockstep.workbench.models.capture import FULL
from tests.sessions.samples import create, record

STEPS = 60


def text(step: int) -> str:
    """A note that takes a quarter of a page."""
    return f"at {step}: " + "x" * 4000


class Recording:
    """A recorder whose disk has `pages` left, and what it reported."""

    def __init__(self, path: Path, pages: int) -> None:
        self.path, self.printed = path, list[str]()
        self.recorder = StepRecorder(self.printed.append)
        self.recorder.begin(create(path), None)
        self.room(pages)

    def room(self, pages: int) -> None:
        connection = self.recorder.writer._connection
        (used,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {used + pages}")

    def run(self, first: int, stop: int) -> None:
        for step in range(first, stop):
            self.recorder.step(record(step), FULL)
            self.recorder.write(lambda writer, step=step: writer.event(0, step, "note", text(step)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pages", range(10))
def test_a_disk_that_is_full_at_ten_points_and_then_has_room(tmp_path: Path, pages: int) -> None:
    recording = Recording(tmp_path / "a.session", pages)
    recording.run(0, STEPS)
    assert len(recording.printed) == 1
    assert recording.printed[0].startswith("nothing is recorded since step")
    with Session.open(recording.path) as session:
        before = len(session.steps())
    assert before < STEPS
    assert len(recording.recorder.backlog) >= STEPS - before - 1
    recording.room(10_000)
    recording.run(STEPS, STEPS + 2)
    assert len(recording.printed) == 2
    assert recording.printed[1].startswith("recording goes on: ")
    assert recording.recorder.up_to_date
    with pytest.raises(RecordingLost, match=r"the tensors of \d+ steps are not in"):
        recording.recorder.close()
    assert verify(recording.path) == []
    with Session.open(recording.path) as session:
        assert session.steps() == range(STEPS + 2)
        assert all(session.stats(s).tobytes() == record(s).stats.tobytes() for s in session.steps())
        assert [e.text for e in session.events()] == [text(step) for step in range(STEPS + 2)]
        for step in session.steps():
            whole = session.tensor("embed", step=step, rank=0) is not None
            assert whole != any("2 tensors" in words for words in session.step(step).dropped)


def test_beyond_the_bound_statistics_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "KEPT_STEPS", 16)
    recording = Recording(tmp_path / "a.session", 0)
    recording.run(0, STEPS)
    recording.room(10_000)
    recording.run(STEPS, STEPS + 1)
    lost = recording.recorder.backlog.losses
    with pytest.raises(RecordingLost, match="the statistics of"):
        recording.recorder.close()
    with Session.open(recording.path) as session:
        assert session.steps() == range(STEPS + 1)
        bare = [step for step in session.steps() if session.stats(step) is None]
        assert lost.endswith(f"the statistics of {len(bare)} steps")
        assert bare == list(range(bare[0], STEPS - 16))
        assert all("statistics and checksums" in session.step(s).dropped[-1] for s in bare)
        assert session.step(bare[0]).sequences[0].emitted == bare[0] + 1
    assert verify(recording.path) == []


def test_what_never_finds_room_is_named_at_the_end(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "a.session", 0)
    recording.run(0, STEPS)
    with Session.open(recording.path) as session:
        before = len(session.steps())
    with pytest.raises(
        RecordingLost, match=rf"steps \({before} to {STEPS - 1}\) were not recorded: cannot write"
    ):
        recording.recorder.close()
    assert verify(recording.path) == []


def test_on_to_another_file(tmp_path: Path) -> None:
    """What was recorded, what waits, and what comes: all in the new file; the old one keeps what it had."""
    recording, anew = Recording(tmp_path / "a.session", 3), tmp_path / "b.session"
    recording.run(0, STEPS)
    with pytest.raises(SessionWriteError, match="is being recorded by process"):
        recording.recorder.move(recording.path)
    recording.recorder.move(anew)
    recording.run(STEPS, STEPS + 1)
    with pytest.raises(RecordingLost):
        recording.recorder.close()
    with Session.open(anew) as session:
        assert session.steps() == range(STEPS + 1)
        assert len(session.events()) == STEPS + 1
    assert verify(anew) == verify(recording.path) == []
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.session", "b.session"]
