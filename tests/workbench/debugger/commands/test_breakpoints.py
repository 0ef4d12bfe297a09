"""Breakpoints, watchpoints, catchpoints: the same stops live, over the record, and backwards."""

from __future__ import annotations

import pytest

from lockstep.sessions.records import STATISTICS
from lockstep.workbench.cli.console import Console
from lockstep.workbench.debugger.answers import Stop
from lockstep.workbench.debugger.core import motion
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.errors import CommandError, NotCaptured
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.models.capture import NOTHING
from lockstep.workbench.views.sentinels import repeated_phrase
from tests.workbench.debugger.conftest import Live, texts

pytestmark = pytest.mark.sampled_file(2)


def go(debugger: Debugger, line: str = "continue") -> Stop:
    result = debugger.execute(line)
    assert isinstance(result, Stop)
    return result


def test_a_location_and_a_condition(live: Live) -> None:
    debugger = live(tp=2)
    debugger.execute("break layers.1.attn.* if step >= 1 and kv_len > 5")
    stop = go(debugger)
    assert (stop.reason, stop.step, stop.tap) == ("breakpoint", 1, "layers.1.attn.q_proj")
    assert list(stop.hit_breakpoint_ids) == [1]
    assert go(debugger).tap == "layers.1.attn.k_proj"


def test_a_condition_on_one_rank_stops_all_and_names_it(live: Live) -> None:
    debugger = live(tp=2)
    debugger.execute("break layers.0.attn.q_proj if absmax > 0 rank 1")
    stop = go(debugger)
    assert (stop.reason, stop.thread_id) == ("breakpoint", 1)


def test_watch_live_is_what_the_record_shows(live: Live) -> None:
    debugger = live(tp=2)
    debugger.execute("next 3")
    stats = debugger.timeline.stats(0, 2)
    assert stats is not None
    place = debugger.timeline.places.exact("layers.1.mlp.up")
    limit = float(stats[place, :, 4].max()) * 0.999
    debugger.execute(f"watch layers.*.mlp.up absmax > {limit:.6f}")
    back = go(debugger, "reverse-continue")
    debugger.execute("goto -1")
    recorded = [(s.step, s.tap) for s in (go(debugger) for _ in range(3))]
    fresh = live(tp=2)
    fresh.execute(f"watch layers.*.mlp.up absmax > {limit:.6f}")
    assert [(s.step, s.tap) for s in (go(fresh) for _ in range(3))] == recorded
    assert back.reason == "data breakpoint"
    assert back.step <= 2


def test_a_condition_is_judged_on_a_short_step_when_it_is_over(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where asking the ranks at every tap would cost many times the step; the stop is the same."""
    monkeypatch.setattr(motion, "_SOON", 60.0)  # short on any machine, whatever else it does
    debugger = live(tp=2)
    texts(debugger, "next 2", "break layers.*.mlp.act if step == 3 and rms > 0")
    assert debugger.executor is not None
    stops = [go(debugger).to_json() for _ in range(2)]
    assert debugger.executor.flight is None
    assert [stop["tap"] for stop in stops] == ["layers.0.mlp.act", "layers.1.mlp.act"]
    assert go(debugger, "stepi").tap == "layers.1.mlp.down.partial"
    texts(debugger, "break layers.0.attn.probs", "goto 3")
    assert go(debugger).tap == "layers.0.attn.probs"
    assert debugger.executor.flight is not None, "an unconditional breakpoint stops the ranks inside the step"
    debugger.executor.land()  # the next one drives the same engine
    fresh = live(tp=2)
    fresh.execute("break layers.*.mlp.act if step == 3 and rms > 0")
    fresh.execute("tbreak embed if step == 3")  # both in one step
    assert go(fresh).tap == "embed"
    assert [go(fresh).to_json() for _ in range(2)] == stops


def test_ignore_tbreak_disable_delete(live: Live) -> None:
    debugger = live()
    texts(debugger, "break embed", "ignore 1 2", "tbreak logits if step == 1")
    assert [(go(debugger).step, go(debugger).step)] == [(1, 2)]
    debugger.execute("disable 1")
    assert [one.id for one in debugger.breakpoints] == [1]
    assert go(debugger, "next 2").reason == "step"
    debugger.execute("enable 1")
    assert go(debugger).tap == "embed"
    debugger.execute("delete")
    assert list(debugger.breakpoints) == []


def test_an_ignored_hit_does_not_swallow_the_goal(live: Live) -> None:
    debugger = live()
    texts(debugger, "break layers.1.attn_norm", "ignore 1 5")
    assert go(debugger, "until layers.1.attn_norm").tap == "layers.1.attn_norm"


def test_commands_run_at_each_stop(live: Live) -> None:
    debugger = live()
    texts(debugger, "break layers.0.attn.scores", "commands 1\nframe\nend")
    stop = go(debugger)
    assert "layers.0.attn.scores, step 0" in stop.to_text()
    texts(debugger, "commands 1\ncontinue\nend", "break logits if step == 2")
    stop = go(debugger)
    assert (stop.step, stop.tap) == (2, "logits")


def test_catch_nan_and_back_to_where_it_began(live: Live) -> None:
    debugger = live(tp=2, rules={"mask": "additive"})
    debugger.execute("catch nan")
    first = go(debugger)
    assert (first.reason, first.step, first.tap) == ("exception", 0, "layers.0.attn.scores")
    debugger.execute("disable")
    debugger.execute("next 3")
    debugger.execute("enable")
    back = go(debugger, "reverse-continue")
    assert (back.step, back.tap, list(back.hit_breakpoint_ids)) == (0, "layers.0.attn.scores", [1])
    assert go(debugger, "reverse-continue").reason == "entry"


def test_without_statistics_nothing_is_reported_as_clean(live: Live) -> None:
    debugger = live(rules={"mask": "additive"})
    assert debugger.executor is not None
    with debugger.executor.capturing(NOTHING):
        texts(debugger, "next 2", "catch nan")
        with pytest.raises(NotCaptured, match="--capture stats"):
            debugger.execute("reverse-continue")
        stop = go(debugger)
        assert (stop.step, stop.tap) == (2, "layers.0.attn.scores"), "the ranks judge what they run"
        debugger.executor.land()


def test_catch_inf_does_not_take_the_mask_for_one(live: Live) -> None:
    debugger = live(tp=2)
    debugger.execute("catch inf")
    assert go(debugger, "next 2").reason == "step"


def test_catch_desync_names_the_rank(live: Live) -> None:
    debugger = live(tp=2, rules={"reduce": "missing"})
    debugger.execute("catch desync")
    stop = go(debugger)
    assert (stop.reason, stop.tap) == ("exception", "layers.0.attn.o_proj")


def test_a_catchpoint_is_left_behind(live: Live) -> None:
    """What a sentinel finds at an operation must not hold the run there for ever."""
    debugger = live(tp=2, rules={"reduce": "missing"})
    texts(debugger, "next 2", "catch desync", "catch nan")
    stop = go(debugger)
    assert (stop.step, stop.tap) == (2, "layers.0.attn.o_proj"), "what began before it was set shows once"
    stop = go(debugger, "next 4")
    assert (stop.reason, stop.step) == ("step", 5), "neither at what is computed from it nor there again"
    fresh = live(tp=2, rules={"reduce": "missing"})
    texts(fresh, "catch desync", "disable", "until layers.1.attn_norm", "enable")
    stop = go(fresh)
    assert (stop.step, stop.tap) == (0, "layers.0.attn.o_proj"), "a step under way is judged when it is over"
    texts(fresh, "goto -1")
    assert (go(fresh).step, go(fresh, "next").reason) == (0, "step"), "gone back behind it, it is met again"


@pytest.mark.parametrize("motion", ["next", "step", "continue"])
def test_catch_nan_stops_once_where_it_begins(live: Live, motion: str) -> None:
    """Judged when the step is over, inside the step, and over the record: the same stops. A patch makes a second one,
    in clean values."""
    debugger = live(tp=2, rules={"mask": "additive"})
    debugger.execute("catch nan")
    assert go(debugger, motion).reason in ("exception", "step")
    while debugger.position.step < 3:
        go(debugger, motion if motion != "continue" else "next")
    hits = [one.hits for one in debugger.breakpoints]
    assert hits == [1], "not at each of the taps after it, nor in each of the steps after it"
    reported = [(one.step, one.tap) for one in _stops(debugger) if one.reason == "exception"]
    assert reported == [(0, "layers.0.attn.scores")]
    texts(debugger, "delete", "goto -1", "catch nan")
    assert [(one.step, one.tap) for one in (go(debugger, "next"), go(debugger, "next 3"))] == [
        (0, "layers.0.attn.scores"), (2, ""),
    ]  # fmt: skip


def _stops(debugger: Debugger) -> list[Stop]:
    debugger.session.refresh()
    fields = ("reason", "description", "branch", "step", "tap", "position", "token")
    events = [event.data for event in debugger.session.events(kind="stop")]
    return [Stop(*(event.get(name) for name in fields), 0, ()) for event in events]


def test_nan_that_begins_anew_is_another_stop(live: Live) -> None:
    debugger = live(tp=2)
    texts(debugger, "next 2", "catch nan", "patch layers.1.mlp.gate[0, 0] = nan")
    texts(debugger, "goto 0")
    stop = go(debugger)
    assert (stop.step, stop.tap) == (1, "layers.1.mlp.gate")
    rest = [(one.step, one.tap) for one in (go(debugger, "next"), go(debugger, "next"))]
    assert rest == [(1, ""), (2, "")], "the caches of the layer carry none of it on"
    texts(debugger, "goto 1", "patch layers.0.attn.v_proj[0, 0] = nan", "goto 0")
    stops = [go(debugger), go(debugger, "next"), go(debugger, "next"), go(debugger, "next")]
    assert [(one.step, one.tap) for one in stops] == [
        (1, "layers.0.attn.v_proj"), (1, ""), (2, ""), (3, ""),
    ], "what the cache hands on is not new"  # fmt: skip
    stats = debugger.timeline.stats(debugger.position.branch, 3)
    assert stats is not None
    assert stats[-1, :, STATISTICS.index("nan")].all(), "though the logits have it still"


def test_a_toggle_reports_nothing_and_the_next_motion_does(live: Live) -> None:
    """The run ahead is for comparing; whoever goes on is shown what a catchpoint finds."""
    debugger = live(tp=2)
    texts(debugger, "catch nan", "catch desync", "next 2")
    stop = go(debugger, "toggle mask additive")
    assert (stop.reason, stop.branch) == ("toggle", 1)
    assert debugger.timeline.last(1) == debugger.timeline.last(0)
    step = debugger.position.step + 1
    stop = go(debugger, "next")
    assert (stop.reason, stop.step, stop.tap) == ("exception", step, "layers.0.attn.scores")
    assert (go(debugger, "next").step, debugger.position.place) == (step, None)
    assert go(debugger, "next 2").step == step + 2
    debugger.execute("toggle mask filled")
    assert go(debugger, "next").reason in ("step", "end")


def test_a_condition_on_a_catchpoint_is_beside_its_own(live: Live) -> None:
    debugger = live(tp=2, rules={"mask": "additive"})
    texts(debugger, "catch nan", "condition 1 step >= 2")
    assert (go(debugger).step, debugger.position.place is None) == (2, False)
    assert "step >= 2" in debugger.execute("info breakpoints").to_text()
    texts(debugger, "condition 1", "goto -1")
    assert go(debugger).step == 0


def test_a_command_that_fails_at_a_stop_does_not_hide_the_stop(live: Live) -> None:
    debugger = live()
    texts(debugger, "break layers.0.attn.scores", "commands 1\ntopk\nnext\nend", "next")
    stop = go(debugger)
    assert (stop.step, stop.tap) == (1, "layers.0.attn.scores")
    assert "topk: step 1 is not finished" in stop.to_text()
    console = Console(debugger, as_json=False)
    assert console.run([("here:1", "delete"), ("here:2", "next")]) == Exit.OK
    texts(debugger, "break layers.0.attn.scores", "commands 2\ntopk\nend")
    assert console.run([("here:1", "continue"), ("here:2", "quit")]) == Exit.USAGE


def test_displays_are_shown_once_a_stop(live: Live) -> None:
    debugger = live()
    texts(debugger, "break layers.0.attn.scores", "commands 1\nnext\nend", "next", "display frame logits")
    assert go(debugger).to_text().count("logits, step 1") == 1


def test_catch_repetition(live: Live) -> None:
    debugger = live()
    debugger.execute("catch repetition")
    stop = go(debugger, "next 40")
    tokens = debugger.timeline.tokens(0)
    assert repeated_phrase(tokens) > 0
    assert stop.reason == "exception"
    assert repeated_phrase(tokens[:-1]) == 0


@pytest.mark.parametrize(
    ("tokens", "length"),
    [
        ([1] * 8, 1),
        ([1] * 7, 0),
        ([1, 2] * 4, 2),
        ([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3], 3),
        (list(range(40)), 0),
    ],
)
def test_repeated_phrases(tokens: list[int], length: int) -> None:
    assert repeated_phrase(tokens) == length


def test_catch_golden_wants_a_reference(live: Live) -> None:
    with pytest.raises(CommandError, match="`golden` records one"):
        live().execute("catch golden")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("break", "where is missing"),
        ("break layers.9.attn.q_proj", "did you mean"),
        ("break logits if speed > 1", "'speed' is unknown at a tap"),
        ("watch logits", "wants a predicate"),
        ("catch fire", "must be one of"),
        ("delete 7", "no breakpoint 7"),
        ("break logits rank 2", "no rank 2"),
        ("break logits if", "a condition follows `if`"),
        ("break logits iff nan", "unexpected 'iff'"),
        ("break logits if nan(embed) > 0", "speaks of the tap it stops at: nan, not nan"),
        ("b1", "no command"),
        ("re", "ambiguous"),
    ],
)
def test_mistakes_are_reported(live: Live, line: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        live().execute(line)
