"""What becomes of the recording when the disk is full: the run goes on, the session is whole up to there."""

from __future__ import annotations

from sessions import Session, verify
from tests.workbench.debugger.conftest import Live, finish, texts


def test_a_full_disk_ends_the_recording_and_not_the_run(live: Live) -> None:
    debugger = live()
    warnings: list[str] = []
    assert debugger.executor is not None
    assert debugger.writer is not None
    inferior = debugger.executor.inferior
    usual, inferior.on_warning = inferior.on_warning, warnings.append
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
        inferior.on_warning = usual
    path = finish(debugger)
    assert verify(path) == []
    with Session.open(path) as session:
        assert len(session.steps()) == recorded
        assert [session.step(k).sequences[0].emitted for k in range(recorded)] == tokens[:recorded]
