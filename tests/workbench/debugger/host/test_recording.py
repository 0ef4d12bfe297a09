"""What becomes of the recording when the disk is full: the run goes on, the session is whole up to there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lockstep.sessions import Session, SessionWriteError
from lockstep.sessions.errors import RecordingLost
from lockstep.sessions.verify import verify
from lockstep.workbench.exit_codes import Exit
from tests.preloaded import run_module
from tests.sessions.samples import write
from tests.workbench.debugger.conftest import Live, finish, texts


@pytest.mark.slow
def test_a_run_whose_file_may_not_grow_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    """The whole program under a limit on the size of files, which the system answers like a full disk."""
    session, limit = tmp_path / "full.session", 400_000
    commands = [
        "next 40",
        "reverse-next 5",
        "toggle rope interleaved --stay",
        "next",
        "expect step == 35 and branch == 1",
    ]
    done = run_module(
        "lockstep.workbench.cli", "run", str(checkpoint), "--ids", "3,14,15", "--batch", "--save", str(session),
        *(word for line in commands for word in ("--ex", line)),
        most_file_bytes=limit, LOCKSTEP_DATA_DIR=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == Exit.NOT_SAVED, done.stderr
    assert done.stderr.count("nothing is recorded since step") == 1
    assert f"recorded in {session} in part: " in done.stderr
    assert verify(session) == []
    with Session.open(session) as opened:
        recorded = len(opened.steps())
        assert 1 <= recorded < 40
        # A step whose commit SQLite calls failed may be whole in the log all the same: there is more then, never less.
        reported = re.search(r"nothing is recorded since step (\d+):", done.stderr)
        assert reported is not None
        assert int(reported[1]) in (recorded, recorded - 1)
        assert f"({recorded} to 35) were not recorded: " in done.stderr


@pytest.mark.slow
def test_a_full_disk_ends_the_recording_and_not_the_run(live: Live) -> None:
    debugger = live()
    warnings: list[str] = []
    assert debugger.executor is not None
    inferior = debugger.executor.inferior
    usual, inferior.recorder.on_warning = inferior.recorder.on_warning, warnings.append
    try:
        texts(debugger, "next 2")
        writer = inferior.recorder.writer
        connection = writer._connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 2}")  # SQLite then reports a full disk
        texts(debugger, "next 20")
        assert len(warnings) == 1
        assert warnings[0].startswith("nothing is recorded since step")
        assert debugger.execute("note lost").to_text().startswith("not noted yet")
        debugger.session.refresh()
        recorded = len(debugger.session.steps())
        assert 2 <= recorded < 20
        tokens = debugger.timeline.tokens(0)
        # what was not recorded is remembered, and the engine still goes back and forth over it
        assert debugger.execute("goto 15").to_json()["step"] == 15
        assert (
            "layers.0.mlp.act[0, 0], step 15 = " in debugger.execute("print layers.0.mlp.act[0, 0]").to_text()
        )
        texts(
            debugger,
            "reverse-next 3",
            "toggle rope interleaved --stay",
            "next",
            "branch 0",
            "goto 21",
            "next",
        )
        assert debugger.timeline.tokens(0)[:-1] == tokens
        connection.execute("PRAGMA max_page_count = 100000")  # there is room again
        texts(debugger, "branch 0", "note found")
        assert debugger.recording
        texts(debugger, "goto 22", "next")
        assert len(warnings) == 2
        assert re.match(r"recording goes on: \d+ steps \(\d+ to \d+\) were recorded late", warnings[1])
    finally:
        inferior.recorder.on_warning = usual
    path = debugger.session.path
    with pytest.raises(RecordingLost, match=r"the tensors of \d+ steps are not in"):
        finish(debugger)
    assert verify(path) == []
    with Session.open(path) as session:
        assert session.steps() == range(24)
        assert [session.step(k).sequences[0].emitted for k in session.steps()][: len(tokens)] == tokens
        assert all(session.stats(k) is not None for k in session.steps())
        assert [branch.name for branch in session.branches()] == ["main", "rope=interleaved"]
        assert [event.text for event in session.events(kind="note")] == ["lost", "found"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_whose_file_was_taken_away_is_recorded_anew(live: Live, tmp_path: Path, replaced: bool) -> None:
    """The new file has everything: what was recorded, and what was run while there was no file."""
    debugger = live()
    warnings: list[str] = []
    inferior = debugger.executor.inferior
    inferior.recorder.on_warning = warnings.append
    texts(debugger, "next 3")
    path, stranger = debugger.session.path, b""
    if replaced:
        stranger = os.replace(write(tmp_path / "b.session", 2), path) or path.read_bytes()
    else:
        path.unlink()
    texts(debugger, "next 2")
    assert len(warnings) == 1
    assert warnings[0].startswith("nothing is recorded since step 3: ")
    assert ("replaced by another file" if replaced else "deleted or moved away") in warnings[0]
    assert "print" not in debugger.execute("goto 1").to_text()
    with pytest.raises(SessionWriteError):
        debugger.execute(f"record {path}")
    assert "wait in memory" in debugger.execute("record").to_text()
    anew = tmp_path / "anew.session"
    assert (
        debugger.execute(f"record {anew}").to_text() == f"recorded in {anew}, without the tensors of 2 steps"
    )
    texts(debugger, "goto 4", "next")
    assert debugger.session.path == anew
    tokens = debugger.timeline.tokens(0)
    with pytest.raises(RecordingLost, match="the tensors of 2 steps"):
        finish(debugger)
    assert verify(anew) == []
    with Session.open(anew) as session:
        assert [session.step(k).sequences[0].emitted for k in session.steps()] == tokens
    assert path.exists() == replaced
    if replaced:
        assert path.read_bytes() == stranger
