"""Forwards and backwards: any way to a position ends in the state of a run that goes straight there."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lockstep.engine.parallel.operations import OpKind
from lockstep.engine.ranks.messages import ChecksumCache
from lockstep.engine.run.sampling import Sampling
from lockstep.workbench.debugger.answers import Position, Stop
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.errors import CommandError, DebuggerError
from lockstep.workbench.inferior.inferior import Inferior
from tests.workbench.debugger.conftest import Engines, Live, finish, texts

pytestmark = pytest.mark.sampled_file(2)

STEPS = 7


def stop_of(debugger: Debugger, line: str) -> Stop:
    result = debugger.execute(line)
    assert isinstance(result, Stop)
    return result


# --- straight lines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
def test_stepping_visits_every_operation_in_order(live: Live, tp: int) -> None:
    debugger = live(tp=tp)
    names = debugger.timeline.places.names
    seen = [stop_of(debugger, "stepi").tap for _ in names]
    assert tuple(seen) == names
    end = stop_of(debugger, "stepi")
    assert (end.tap, end.step) == ("", 0)
    assert stop_of(debugger, "step").tap == "embed"
    assert stop_of(debugger, "step").tap == "layers.0.attn_norm"
    assert stop_of(debugger, "finish").tap == "layers.0.mlp_residual"
    assert stop_of(debugger, "until logits").tap == "logits"
    assert stop_of(debugger, "finish").step == 1


def test_recorded_and_new_steps_stop_alike(live: Live) -> None:
    """The same commands give the same stops whether a step runs or is read from the record."""
    commands = [
        "next",
        "step",
        "step 2",
        "stepi 3",
        "finish",
        "next 2",
        "until layers.2.mlp.up",
        "next",
        "goto 5",
    ]
    debugger = live()
    first = [stop_of(debugger, line).to_json() for line in commands]
    debugger.execute("goto -1")
    assert [stop_of(debugger, line).to_json() for line in commands] == first


def test_going_back_and_forth_operation_by_operation(live: Live) -> None:
    debugger = live()
    debugger.execute("next 2")
    there = [debugger.position]
    for _ in range(70):
        debugger.execute("reverse-stepi")
        there.append(debugger.position)
    for expected in there[-2::-1]:
        debugger.execute("stepi")
        assert debugger.position == expected


def test_reverse_step_is_the_way_back_of_step(live: Live) -> None:
    debugger = live()
    debugger.execute("next 2")
    backwards = [stop_of(debugger, "reverse-step").tap for _ in range(7)]
    assert backwards == ["logits", "final_norm", *(f"layers.{i}.attn_norm" for i in (2, 1, 0)), "embed", ""]


# --- the property ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Straight:
    """What a run that goes straight on has after each step."""

    checksums: list[NDArray[np.uint64]]
    tokens: list[int]
    kv: list[list[int]]  # before each step, and after the last


#: Ranks and rules. The wrong ones overwrite, or never read, rows of the cache: going back must not rely on those.
RUNS: list[tuple[int, dict[str, str]]] = [
    (1, {}), (2, {}), (1, {"positions": "stuck"}), (1, {"positions": "ahead"}), (1, {"cache_reuse": "false"}),
]  # fmt: skip
SAMPLING = Sampling(temperature=1.0, seed=11)


def cached(inferior: Inferior) -> list[int]:
    """One number a rank for all that is cached."""
    return [report.checksum for report in inferior.client.call(ChecksumCache())]


@pytest.fixture(scope="module")
def straight(engines: Engines) -> Any:
    """(tp, rules) -> a run straight on, on an inferior without a debugger."""
    known: dict[str, Straight] = {}

    def get(tp: int, rules: dict[str, str]) -> Straight:
        if (key := f"{tp} {rules}") not in known:
            inferior = engines.get(tp)
            inferior.set_rules(rules)
            inferior.add([3, 14, 15, 92, 65], SAMPLING)
            kv, sums, tokens = [], [], []
            for _ in range(STEPS):
                kv.append(cached(inferior))
                record = inferior.step()
                assert record.checksums is not None
                assert record.sequences[0].emitted is not None
                sums.append(record.checksums)
                tokens.append(record.sequences[0].emitted)
            kv.append(cached(inferior))
            known[key] = Straight(sums, tokens, kv)
        return known[key]

    return get


motions = st.one_of(
    st.sampled_from([
        "next", "next 2", "step", "step 3", "stepi", "stepi 20", "finish", "reverse-next", "reverse-next 3",
        "reverse-step", "reverse-step 4", "reverse-stepi", "reverse-stepi 30", "until layers.1.attn.probs",
        "reverse-continue", "print layers.1.mlp.act[0, :2]", "run", "info kv", "restart",
    ]),
    st.tuples(st.just("goto"), st.integers(-1, STEPS - 1)).map(lambda pair: f"{pair[0]} {pair[1]}"),
    st.integers(0, STEPS - 1).map(lambda step: f"goto {step} layers.1.attn.scores"),
    st.sampled_from(["tbreak layers.1.attn.q_rope if step >= 2", "break layers.2.mlp.up if absmax > 3", "delete"]),
)  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("tp", "rules"), RUNS, ids=str)
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # to shrink would cost minutes
)
@given(commands=st.lists(motions, max_size=7))
def test_any_way_ends_where_the_straight_way_ends(
    live: Live, straight: Any, tp: int, rules: dict[str, str], commands: list[str]
) -> None:
    expected: Straight = straight(tp, rules)
    debugger = live(tp=tp, rules=rules, sampling=SAMPLING)
    debugger.execute("break logits if step >= 6")  # keeps `run` within what is known
    try:
        for line in commands:
            if line == "delete":
                line = "disable 2" if len(list(debugger.breakpoints)) > 1 else "info breakpoints"
            try:
                debugger.execute(line)
            except (CommandError, DebuggerError):
                continue  # nothing was run yet, not inside a step, …: refused, and nothing has changed
            if debugger.position.step >= STEPS - 1:
                debugger.execute("goto 3")
        agree(debugger, expected)
    finally:
        finish(debugger)


def agree(debugger: Debugger, expected: Straight) -> None:
    """Every recorded step, and the engine brought to the position, are those of the straight run."""
    at, timeline = debugger.position, debugger.timeline
    for step in range(timeline.last(0) + 1):
        sums = timeline.record(0, step).checksums
        assert sums is not None
        assert (sums == expected.checksums[step]).all()
        assert timeline.sequence(0, step).emitted == expected.tokens[step]
    done = at.step + 1 if at.place is None else at.step
    assert debugger.executor is not None
    debugger.executor.reach(at.branch, done)
    assert cached(debugger.executor.inferior) == expected.kv[done]


# --- divergence --------------------------------------------------------------------------------------


def test_a_re_execution_that_differs_stops_with_divergence(live: Live) -> None:
    """The record is tampered with: what is run again no longer agrees, and states where."""
    debugger = live(tp=2)
    debugger.execute("next 4")
    place = debugger.timeline.places.exact("layers.1.attn.q_proj")
    sums = debugger.timeline.record(0, 1).checksums
    assert sums is not None
    changed = sums.copy()
    changed[place, 1] ^= np.uint64(1)
    debugger.timeline._memory[0, 1] = replace(debugger.timeline.record(0, 1), checksums=changed)
    assert debugger.executor is not None
    debugger.executor.forget_cache()
    stop = stop_of(debugger, "next")
    assert (stop.reason, stop.step, stop.tap, stop.thread_id) == ("divergence", 1, "layers.1.attn.q_proj", 1)


def test_going_back_reads_and_does_not_run(live: Live) -> None:
    """Looking back must not touch the engine: its count of operations stays."""
    debugger = live()
    debugger.execute("next 5")
    assert debugger.executor is not None
    board = debugger.executor.inferior.client.board
    while board.latest(0).kind is not OpKind.IDLE:  # the answer comes a moment before the rank is idle
        time.sleep(0.01)
    before = board.latest(0).number
    texts(
        debugger,
        "reverse-next",
        "reverse-stepi 10",
        "frame",
        "topk",
        "reverse-next 2",
        "next",
        "attn 0 1",
        "where",
    )
    assert board.latest(0).number == before


def test_a_command_that_is_refused_changes_nothing(live: Live) -> None:
    debugger = live()
    debugger.execute("next")
    at = debugger.position
    for line in (
        "finish",
        "goto -2",
        "until nowhere",
        "next 0",
        "toggle mask nonsense",
        "patch logits[0, 999] = 1",
        "set seed x",
    ):
        with pytest.raises((DebuggerError, ValueError)):
            debugger.execute(line)
        assert debugger.position == at
    assert isinstance(at, Position)
