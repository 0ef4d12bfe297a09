"""`capture`: what the steps to come leave behind, and this one too."""

from __future__ import annotations

import pytest

from engine.errors import RequestError
from tests.workbench.debugger.conftest import Live, finish
from workbench.debugger.host.replay import open_replay


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
    told = debugger.execute("capture").to_text()
    assert "every step records statistics, layers.*.attn.probs within 4 MiB" in told
    with pytest.raises(RequestError, match="no tap matches"):
        debugger.execute("capture layers.9.attn.k_cache")
    with open_replay(finish(debugger)) as replay:
        assert "this is a replay" in replay.execute("capture embed").to_text()
