"""How many rows each layer has cached, as the debugger reports it: in tables, conditions and expressions, live and
afterwards, and in recordings that know one length for all layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.engine.errors import RankError
from lockstep.engine.ranks.reports import StepReport
from lockstep.sessions import Session
from lockstep.sessions.format import codec
from lockstep.workbench.debugger.answers import Stop, TableResult
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.host.replay import open_replay
from lockstep.workbench.debugger.stops.predicates import cached
from tests.sessions.samples import tamper
from tests.workbench.debugger.conftest import PROMPT, Live, finish, texts

SHARED = {"cache_layer": "shared"}


def kv(debugger: Debugger) -> list[list[object]]:
    table = debugger.execute("info kv")
    assert isinstance(table, TableResult)
    return [list(row) for row in table.rows]


def test_layers_that_agree_are_one_line_and_others_are_named(live: Live) -> None:
    debugger = live(tp=2)
    debugger.execute("next 2")
    assert kv(debugger) == [[0, rank, "all", 6, 6, ""] for rank in (0, 1)]
    broken = live(tp=2, rules=SHARED)
    broken.execute("next 2")
    layers = len(broken.timeline.record(0, 0).sequences[0].kv_lens[0])
    found = [[0, "0", 6, 6, ""], [0, f"1–{layers - 1}", 0, 6, "MISALIGNED"]]
    assert kv(broken) == [[seq, rank, *rest] for rank in (0, 1) for seq, *rest in found]


def test_an_expression_reports_the_layer_that_is_stood_in(live: Live) -> None:
    debugger = live(tp=2, rules=SHARED)
    debugger.execute("next 3")
    reported = {
        place: texts(debugger, f"goto 1 {place}", "print kv_len")[-1]
        for place in ("", "layers.0.attn.scores", "layers.1.attn.scores")
    }
    # Between the layers it is the layer with the fewest rows that speaks.
    assert reported == {
        "": "kv_len = 0",
        "layers.0.attn.scores": "kv_len = 6",
        "layers.1.attn.scores": "kv_len = 0",
    }


@pytest.mark.parametrize("rules", [{}, SHARED, {"positions": "stuck"}, {"positions": "ahead"}], ids=str)
def test_conditions_are_the_same_live_and_recorded(live: Live, rules: dict[str, str]) -> None:
    """Every layer and the taps around them, before the write and after it."""
    debugger = live(tp=2, rules=rules)
    taps = ["embed", "layers.0.attn.q_proj", "layers.1.attn.q_proj", "layers.1.attn.scores", "logits"]
    expected = {}
    debugger.execute("next")
    for tap in taps:
        debugger.execute(f"until {tap}")
        assert debugger.engine.inferior.paused is not None
        expected[tap] = [rows[0] for rows in debugger.engine.inferior.paused.kv_lens]
    debugger.execute("next")
    names = debugger.timeline.names(0, 1)
    assert names is not None
    whole = np.broadcast_to(names["kv_len"], (len(debugger.timeline.places), 2))
    for tap in taps:
        assert whole[debugger.timeline.places.exact(tap)].tolist() == expected[tap], tap


def test_a_recording_of_one_length_a_rank_is_shown(live: Live, tmp_path: Path) -> None:
    debugger = live(tp=2)
    debugger.execute("next 2")
    path = finish(debugger)
    tamper(path, "UPDATE sequences SET kv_lens = ? WHERE step = 1", arguments=(codec.encode_ints([6, 4]),))
    with Session.open(path) as session:
        assert session.step(1).sequences[0].kv_lens == ((6,), (4,))
    old = open_replay(path)
    old.execute("goto 1")
    assert kv(old) == [[0, 0, "all", 6, 6, ""], [0, 1, "all", 4, 6, "MISALIGNED"]]
    assert texts(old, "print kv_len") == ["kv_len = 4"]
    names = old.timeline.names(0, 1)
    assert names is not None
    assert names["kv_len"].tolist() == [[6.0, 4.0]]
    old.close()


def test_lengths_by_tap_and_rank() -> None:
    lengths = [[9, 7], [9, 8]]
    assert cached(lengths, [None, 0, 1, 5], 2).tolist() == [[7, 8], [9, 9], [7, 8], [7, 8]]
    assert cached([[3], [4]], [None, 0, 1], 2).tolist() == [[3, 4]]
    assert np.isnan(cached((), [0], 2)).all()


def test_a_correct_engine_whose_layer_loses_rows_is_stopped(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a fault in force a layer that did not write is an error, with its name."""
    debugger = live(tp=2)
    debugger.execute("next 1")
    client = debugger.engine.inferior.client
    collect = client.collect

    def lose(*arguments: object) -> list[StepReport]:
        reports = collect(*arguments)
        reports[1].sequences[0].held[1] = len(PROMPT)
        return reports

    monkeypatch.setattr(client, "collect", lose)
    inferior = debugger.engine.inferior
    assert inferior.step().sequences[0].kv_lens[1][1] == len(PROMPT)
    assert client.alive
    with pytest.raises(
        RankError, match="step 1: 6 tokens were run, the cache holds 5 rows in layer 1 on rank 1"
    ):
        inferior.check_aligned()


def test_a_debugger_stops_where_a_correct_engine_loses_rows(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is not ended; a replay stops there as well, and the run goes on from there."""
    debugger = live(tp=2)
    debugger.execute("next")
    client = debugger.engine.inferior.client
    collect = client.collect

    def lose(*arguments: Any) -> list[Any]:
        reports = collect(*arguments)
        if isinstance(reports[1], StepReport) and reports[1].sequences[0].positions[-1] >= len(PROMPT) + 1:
            reports[1].sequences[0].held[1] = len(PROMPT)
        return reports

    monkeypatch.setattr(client, "collect", lose)
    stop = debugger.execute("until 3")
    assert isinstance(stop, Stop)
    expected = "cache misaligned: sequence 0 has 5 rows in layer 1 on rank 1, its positions ask for 7"
    assert (stop.reason, stop.step, stop.thread_id, stop.description) == ("exception", 2, 1, expected)
    assert debugger.live
    after = debugger.execute("next")
    assert isinstance(after, Stop)
    assert (after.reason, after.step) == ("step", 3)
    with open_replay(finish(debugger)) as replay:
        again = replay.execute("continue")
        assert isinstance(again, Stop)
        assert (again.step, again.description) == (2, expected)
