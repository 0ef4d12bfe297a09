"""Breakpoints, watchpoints, catchpoints: the same stops live, over the record, and backwards."""

from __future__ import annotations

import pytest

from tests.workbench.debugger.conftest import Live, texts
from workbench.cli.console import Console
from workbench.debugger.answers import Stop
from workbench.debugger.core.debugger import Debugger
from workbench.debugger.errors import CommandError, NotCaptured
from workbench.exit_codes import Exit
from workbench.models.capture import NOTHING
from workbench.views.sentinels import repeated_phrase


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


def test_watch_live_is_what_the_record_says(live: Live) -> None:
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


def test_a_condition_is_judged_on_a_short_step_when_it_is_over(live: Live) -> None:
    """Where asking the ranks at every tap would cost many times the step; the stop is the same."""
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


def test_without_statistics_nothing_is_said_to_be_clean(live: Live) -> None:
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
    debugger.execute("catch desync")
    assert [(s.step, s.tap) for s in (go(debugger) for _ in range(3))] == [
        (step, "layers.0.attn.o_proj") for step in range(3)
    ]
    debugger.execute("goto 1 layers.2.attn_norm")
    assert go(debugger).step == 2, "a recorded step's finding lies behind whoever has passed it"
    debugger.execute("disable")
    debugger.execute("until layers.1.attn_norm")
    debugger.execute("enable")
    stop = go(debugger)
    assert (stop.step, stop.tap) == (3, "layers.0.attn.o_proj"), "a step under way is judged when it is over"


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
def test_mistakes_are_told(live: Live, line: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        live().execute(line)
