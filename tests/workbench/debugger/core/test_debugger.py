"""What holds for every command: how it is called, interrupted, and what happens when it fails unexpectedly."""

from __future__ import annotations

import pytest

from lockstep.engine.errors import RankError
from lockstep.workbench import error_log
from lockstep.workbench.debugger.answers import Message, Stop, TableResult
from lockstep.workbench.debugger.core import registry
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.errors import EngineGone, InternalError
from lockstep.workbench.debugger.failures import exit_code, last_operations
from tests.workbench.debugger.conftest import Live


def test_commands_with_an_argument_called_name_can_be_called(live: Live) -> None:
    debugger = live()
    debugger.execute("next")
    assert isinstance(debugger.call("branch", name="main"), Stop)
    assert isinstance(debugger.call("help", name="next"), TableResult)


def test_an_interrupt_while_nothing_runs_is_for_nothing(live: Live) -> None:
    debugger = live()
    debugger.interrupt()
    stop = debugger.execute("next")
    assert isinstance(stop, Stop)
    assert (stop.reason, stop.step) == ("step", 0)
    debugger.interrupt(ahead=True)
    stop = debugger.execute("next")
    assert isinstance(stop, Stop)
    assert stop.reason == "pause"
    assert debugger.execute("next").to_json()["reason"] == "step"


def fail(debugger: Debugger) -> None:
    raise ZeroDivisionError("by chance")


def test_a_defect_is_reported_and_the_debugger_goes_on(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    debugger = live(tp=2)
    debugger.execute("next 2")
    debugger.execute("until layers.1.attn.probs")  # a pass stands still in its middle
    monkeypatch.setitem(registry._FUNCTIONS, "branches", fail)
    with pytest.raises(InternalError, match=r"ZeroDivisionError: by chance .*the debugger goes on") as info:
        debugger.execute("branches")
    assert exit_code(info.value) == 70
    assert f"its traceback is in {error_log.log_file()}" in str(info.value)
    assert "ZeroDivisionError: by chance" in error_log.log_file().read_text(encoding="utf-8")
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    assert (debugger.live, debugger.position.step) == (True, 1)
    stop = debugger.execute("next 2")
    assert isinstance(stop, Stop)
    assert (stop.reason, stop.step) == ("step", 3)
    debugger.session.refresh()
    (event,) = debugger.session.events(kind="error")
    assert event.text == "ZeroDivisionError: by chance"
    assert event.data["command"] == "branches"
    assert event.data["raised_at"].startswith("tests.workbench.debugger.core.test_debugger:")


def test_a_defect_that_costs_the_engine_reports_it(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    debugger = live()
    debugger.execute("next")

    def fail_with_the_engine(debugger: Debugger) -> Message:
        debugger.engine.inferior.client.close()
        raise KeyError("x")

    monkeypatch.setitem(registry._FUNCTIONS, "branches", fail_with_the_engine)
    with pytest.raises(InternalError, match="the engine is lost: `restart`"):
        debugger.execute("branches")
    assert not debugger.live
    debugger.execute("restart")
    assert debugger.execute("next 2").to_json()["step"] == 1


def test_a_rank_that_died_meanwhile_is_reported_before_the_next_command(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the command asks nothing of the engine: a script ends with 5."""
    debugger = live()
    debugger.execute("next")

    def check() -> None:
        raise RankError("rank 0 is lost: killed by SIGKILL", [["the gather of the logits", "rest"]])

    monkeypatch.setattr(debugger.engine.inferior.client, "check", check)
    with pytest.raises(RankError, match="killed by SIGKILL") as info:
        debugger.execute("info breakpoints")
    assert exit_code(info.value) == 5
    assert last_operations(info.value) == ["  rank 0, last operations: the gather of the logits → rest"]
    debugger.session.refresh()
    (event,) = debugger.session.events(kind="error")
    assert event.data["last_operations"] == [["the gather of the logits", "rest"]]
    reported = debugger.execute("info ranks")
    assert isinstance(reported, TableResult)
    assert (reported.title, reported.rows) == (
        str(info.value),
        [[0, "the gather of the logits"], [0, "rest"]],
    )
    with pytest.raises(EngineGone, match="killed by SIGKILL") as gone:
        debugger.execute("next")
    assert exit_code(gone.value) == 5
    monkeypatch.undo()
    debugger.execute("restart")
    assert debugger.live


def test_with_several_prompts_every_word_means_the_first(live: Live) -> None:
    """The first sequence is meant, inside a step and between steps."""
    debugger = live(tp=2, prompts=[[3, 14, 15, 92, 65], [7, 8]])
    debugger.execute("break layers.1.attn.context if position == 4 and token == 65 and kv_len == 5")
    for _ in ("while it runs", "as it was recorded"):
        debugger.execute("goto -1")
        stop = debugger.execute("next")
        assert isinstance(stop, Stop)
        assert (stop.reason, stop.step, stop.tap, stop.position) == (
            "breakpoint",
            0,
            "layers.1.attn.context",
            4,
        )
        where = debugger.execute("where").to_text()
        assert "65" in where.splitlines()[1]
        assert "at position 4" in where
        assert debugger.execute("expect position == 4 and kv_len == 5").to_json()["holds"]
        stop = debugger.execute("next")
        assert isinstance(stop, Stop)
        assert (stop.reason, stop.position) == ("step", 4)
        assert debugger.execute("expect position == 4 and kv_len == 5").to_json()["holds"]
