"""`capture`: what the steps to come leave behind, and this one too."""

from __future__ import annotations

import pytest

from lockstep.engine.errors import RequestError
from lockstep.workbench.debugger.host.replay import open_replay
from tests.workbench.debugger.conftest import Live, finish


def test_this_step_and_those_to_come_have_what_was_asked_for(live: Live) -> None:
    debugger = live(tp=2)
    for line in (
        "next 2",
        "capture layers.*.attn.k_cache",
        "next",
        "capture embed",
        "next",
        "capture stats",
        "next",
    ):
        debugger.execute(line)
    debugger.session.refresh()
    whole = [
        {key.tap.split(".")[-1] for key in debugger.session.captured(step) if not key.slice}
        for step in range(5)
    ]
    asked = [set(), {"k_cache"}, {"k_cache", "embed"}, {"k_cache", "embed"}, set()]
    assert whole == [{"probs"} | taps for taps in asked], "the attention comes by itself"
    reported = debugger.execute("capture").to_text()
    assert (
        "every step records statistics, layers.*.attn.probs layers.*.attn.*_chosen within 4 MiB" in reported
    )
    with pytest.raises(RequestError, match="no tap matches"):
        debugger.execute("capture layers.9.attn.k_cache")
    with open_replay(finish(debugger)) as replay:
        assert "this is a replay" in replay.execute("capture embed").to_text()


def test_inside_a_step_what_has_passed_is_read_and_the_step_goes_on_from_there(live: Live) -> None:
    debugger = live(tp=2)
    for line in ("next 2", "until layers.1.attn.scores"):
        debugger.execute(line)
    reported = debugger.execute("capture layers.*.attn.k_cache").to_text()
    assert "; 2 taps of step 2 added" in reported
    assert debugger.flight is not None, "the step was not finished"
    debugger.session.refresh()

    def cached() -> dict[str, bytes]:
        keys = debugger.session.captured(2)
        names = sorted({key.tap for key in keys if key.tap.endswith("k_cache")})
        return {
            name: b"".join(debugger.session.tensor(name, step=2, rank=rank).tobytes() for rank in (0, 1))
            for name in names
        }

    inside = cached()
    assert list(inside) == ["layers.0.attn.k_cache", "layers.1.attn.k_cache"]
    debugger.execute("stepi")
    debugger.execute("next")
    debugger.session.refresh()
    whole = cached()
    layers = debugger.engine.inferior.model.num_layers
    assert len(whole) == layers > 2, "those that were still to come were recorded as they passed"
    assert {name: whole[name] for name in inside} == inside
    again = live(tp=2)
    again.execute("next 3")
    again.session.refresh()
    assert (again.session.checksums(2) == debugger.session.checksums(2)).all(), "nothing else has changed"
