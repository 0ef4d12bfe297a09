"""What becomes of the recording when the disk is full: the run goes on, the session is whole up to there."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from sessions import Session
from sessions.verify import verify
from tests.workbench.debugger.conftest import Live, finish, texts

ROOT = Path(__file__).resolve().parents[4]


def test_a_run_whose_file_may_not_grow_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    """The whole program under a limit on the size of files, which the system answers like a full disk."""
    session, limit = tmp_path / "full.session", 400_000
    commands = [
        "next 40",
        "reverse-next 5",
        "toggle rope interleaved",
        "next",
        "expect step == 35 and branch == 1",
    ]
    done = subprocess.run(
        [
            sys.executable, "-m", "workbench.cli", "run", str(checkpoint), "--ids", "3,14,15", "--batch",
            "--save", str(session), *(word for line in commands for word in ("--ex", line)),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        env=os.environ | {"LOCKSTEP_DATA_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("recording stopped at step") == 1
    assert "recorded in part" in done.stderr
    assert verify(session) == []
    with Session.open(session) as opened:
        recorded = len(opened.steps())
        assert 1 <= recorded < 40
        assert f"recording stopped at step {recorded}:" in done.stderr


def test_a_full_disk_ends_the_recording_and_not_the_run(live: Live) -> None:
    debugger = live()
    warnings: list[str] = []
    assert debugger.executor is not None
    assert debugger.writer is not None
    inferior = debugger.executor.inferior
    usual, inferior.recorder.on_warning = inferior.recorder.on_warning, warnings.append
    try:
        texts(debugger, "next 2")
        connection = debugger.writer._connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 2}")  # SQLite then says that the disk is full
        texts(debugger, "next 20")
        assert len(warnings) == 1
        assert "recording stopped at step" in warnings[0]
        assert "goes on unrecorded" in warnings[0]
        debugger.session.refresh()
        recorded = len(debugger.session.steps())
        assert 2 <= recorded < 20
        tokens = debugger.timeline.tokens(0)
        # what was not recorded is remembered, and the engine still goes back and forth over it
        assert debugger.execute("goto 15").to_json()["step"] == 15
        assert (
            "layers.0.mlp.act[0, 0], step 15 = " in debugger.execute("print layers.0.mlp.act[0, 0]").to_text()
        )
        texts(debugger, "reverse-next 3", "toggle rope interleaved", "next", "branch 0", "goto 21", "next")
        assert debugger.timeline.tokens(0)[:-1] == tokens
    finally:
        inferior.recorder.on_warning = usual
    path = finish(debugger)
    assert verify(path) == []
    with Session.open(path) as session:
        assert len(session.steps()) == recorded
        assert [session.step(k).sequences[0].emitted for k in range(recorded)] == tokens[:recorded]
