"""Pausing inside a pass: all ranks at the same operation, nothing disturbed by it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.engine.errors import RequestError
from lockstep.engine.ranks.messages import (
    AbandonStep,
    ReadCache,
    ReadTap,
    ResumeStep,
    Rewind,
    RunStep,
    StagePatch,
)
from lockstep.engine.ranks.reports import PauseReport, StepAbandoned
from lockstep.engine.ranks.wire import WireArray
from lockstep.engine.taps.breaks import Break, Pause, PauseSpec
from tests.engine.harness import Engine, Pass

pytestmark = pytest.mark.sampled_file(2)

PROMPT = [3, 130, 17, 99, 4]


@pytest.fixture(params=[1, 2])
def engine(
    request: pytest.FixtureRequest, engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> Iterator[Engine]:
    """A model with statistics on, so that passes can be compared bit by bit."""
    engine = engine_of(request.param)
    engine.load(variant("qwen2-tied"))
    engine.capture(statistics=True)
    engine.add(PROMPT)
    yield engine
    with suppress(RequestError):  # there is nothing to abandon, unless a test failed while paused
        engine.client.call(AbandonStep())


def begin(engine: Engine, **pause: Any) -> list[Pause]:
    """Start a pass that stops: where each rank stands."""
    return [one.pause for one in engine.client.call(RunStep(pause=PauseSpec(**pause)))]


def resume(engine: Engine, **pause: Any) -> Pass:
    """Go on to the end of the pass."""
    return Pass(engine.client.call(ResumeStep(PauseSpec(**pause))), engine.specs)


def stops(engine: Engine, **pause: Any) -> Iterator[Pause]:
    """Rank 0's pause at each stop of one pass, all ranks having stopped at the same place."""
    reports = engine.client.call(RunStep(pause=PauseSpec(**pause)))
    while isinstance(reports[0], PauseReport):
        assert len({report.pause.place for report in reports}) == 1
        yield reports[0].pause
        reports = engine.client.call(ResumeStep(PauseSpec(**pause)))
    engine.last = Pass(reports, engine.specs)


def names(engine: Engine, pauses: Iterator[Pause]) -> list[str]:
    return [engine.specs[pause.place].name for pause in pauses]


def checksums(engine: Engine, passes: int = 1) -> np.ndarray:
    """What undisturbed passes compute from the prompt on."""
    engine.rules({})
    engine.add(PROMPT)
    return np.stack([engine.step().checksums for _ in range(passes)])


def test_every_operation_is_a_stop_in_the_declared_order(engine: Engine) -> None:
    visited = names(engine, stops(engine, stop="operation"))
    assert visited == [spec.name for spec in engine.specs]
    assert (engine.last.checksums == checksums(engine)).all()


def test_layers_are_stops(engine: Engine) -> None:
    visited = names(engine, stops(engine, stop="layer"))
    layers = [f"layers.{i}.attn_norm" for i in range(3)]
    assert visited == ["embed", *layers, "final_norm", "logits"]


def test_one_place_is_a_stop(engine: Engine) -> None:
    place = [spec.name for spec in engine.specs].index("layers.1.attn.probs")
    assert names(engine, stops(engine, stop="place", place=place)) == ["layers.1.attn.probs"]


def test_breaks_stop_where_their_condition_holds(engine: Engine) -> None:
    norms = [i for i, spec in enumerate(engine.specs) if spec.name.endswith("attn_norm")]
    in_layer_1 = Break(5, frozenset([norms[1]]))
    decode_only = Break(6, frozenset(norms), [">=", ["name", "step"], 1])
    first, second = ([*stops(engine, breaks=[in_layer_1, decode_only])] for _ in range(2))
    assert [(s.place, s.breaks, s.reason) for s in first] == [(norms[1], (5,), "breakpoint")]
    assert [s.breaks for s in second] == [(6,), (5, 6), (6,)]


def test_a_condition_that_holds_on_one_rank_stops_all(engine: Engine) -> None:
    tp = engine.client.config.tp
    place = [spec.name for spec in engine.specs].index("layers.0.attn.q_proj")
    conditional = Break(1, frozenset([place]), ["==", ["name", "rank"], tp - 1])
    bound = Break(2, frozenset([place]), rank=0)
    pauses = begin(engine, breaks=[conditional, bound])
    assert [pause.breaks for pause in pauses] == [(1, 2)] * tp
    here = [sorted(pause.here) for pause in pauses]
    assert here == ([[1, 2]] if tp == 1 else [[2], [1]])
    assert resume(engine).reports[0].phase == "prefill"


def test_a_break_that_names_inputs_stops_only_where_its_condition_begins_to_hold(engine: Engine) -> None:
    """Absmax > 0 holds at every tap; the inputs of each are here simply the tap before it."""
    last = len(engine.client.pids) - 1
    place = {spec.name: i for i, spec in enumerate(engine.specs)}
    condition = ["and", [">", ["name", "absmax"], 0.0], ["==", ["name", "rank"], float(last)]]
    every = frozenset(place.values())
    chain = {i: (i - 1,) for i in every if i}
    apart = place["layers.1.attn.q_proj"]
    chain[apart] = (place["embed"] + 10_000,)  # an input that never passes
    hits = Break(7, every, condition, inputs=chain)
    found = names(engine, stops(engine, breaks=[hits]))
    assert found == ["embed", "layers.1.attn.q_proj"], "held on one rank, and inherited on all"
    assert names(engine, stops(engine, breaks=[hits])) == found, "a new pass begins anew"


def test_conditions_see_the_statistics_of_the_tap(engine: Engine) -> None:
    """Infinities that the causal mask puts into the scores of a prefill are no infinities."""
    scores = [i for i, spec in enumerate(engine.specs) if spec.name.endswith("attn.scores")]
    assert not [*stops(engine, breaks=[Break(1, frozenset(scores), [">", ["name", "inf"], 0])])]
    highest = engine.last.statistics[:, scores[0], 1].max()
    engine.rules({})
    engine.add(PROMPT)
    above, below = ([">", ["name", "max"], float(highest) + d] for d in (0.001, -0.001))
    assert not [*stops(engine, breaks=[Break(1, frozenset(scores[:1]), above)])]
    engine.rules({})
    engine.add(PROMPT)
    assert len([*stops(engine, breaks=[Break(1, frozenset(scores[:1]), below)])]) == 1


@pytest.mark.parametrize("tree", [["name", "nonsense"], ["<", 1], [], ["exec", 1, 2], "text", None])
def test_a_malformed_condition_is_refused_by_all_ranks_alike(engine: Engine, tree: Any) -> None:
    broken = Break(1, frozenset([0]), ["not", tree], 0)
    with pytest.raises(RequestError, match=r"condition"):
        begin(engine, breaks=[broken])
    assert begin(engine, stop="place", place=0)[0].place == 0
    with pytest.raises(RequestError, match=r"condition"):
        resume(engine, breaks=[broken])
    assert resume(engine).reports[0].phase == "prefill"  # still paused, and goes on


def test_abandoning_leaves_no_trace(engine: Engine) -> None:
    expected = checksums(engine, passes=3)
    engine.rules({})
    engine.add(PROMPT)
    found = []
    for _ in range(3):
        begin(engine, stop="place", place=40)
        assert engine.client.call(AbandonStep())[0] == StepAbandoned()
        found.append(engine.step())
    assert (np.stack([one.checksums for one in found]) == expected).all()
    assert found[0].sequences[0].positions == [0, 1, 2, 3, 4]
    assert found[0].reports[0].used_blocks == 1


def test_what_passed_can_be_read_and_what_has_not_cannot(engine: Engine) -> None:
    tap = "layers.1.attn.k_rope"
    place = [spec.name for spec in engine.specs].index(tap)
    engine.capture(tap, statistics=True)  # so that both passes take the explicit path through attention
    expected = engine.step().parts(tap)
    engine.rules({})
    engine.add(PROMPT)
    begin(engine, stop="place", place=place)
    read = engine.client.call(ReadTap(place, 0))
    assert all((a.value.array == b).all() for a, b in zip(read, expected, strict=True))
    with pytest.raises(RequestError, match=r"layers\.1\.attn\.k_cache has not passed"):
        engine.client.call(ReadTap(place + 1, 0))
    with pytest.raises(RequestError, match="not possible while paused"):
        engine.add([1], seq=1)
    engine.client.call(AbandonStep())


def test_looking_at_the_cache_does_not_disturb_the_pass(engine: Engine) -> None:
    """The rows of the pass under way lie in a buffer while it is paused between reading and attending."""
    engine.step()
    expected = engine.step().checksums
    engine.client.call(Rewind({0: (len(PROMPT) + 1, len(PROMPT), len(PROMPT))}, 1))
    place = [spec.name for spec in engine.specs].index("layers.0.attn.v_cache")
    begin(engine, stop="place", place=place)
    engine.client.call(ReadCache(2))
    assert (resume(engine).checksums == expected).all()


@pytest.mark.parametrize("tap", ["layers.0.attn_norm", "layers.1.mlp.gate", "layers.2.mlp_residual"])
def test_a_patch_acts_before_and_while_paused_at_its_place(engine: Engine, tap: str) -> None:
    place = [spec.name for spec in engine.specs].index(tap)
    value = WireArray.of(np.full((1, 4), 7.0, np.float32), "float32")
    shares = dict.fromkeys(range(engine.client.config.tp), StagePatch(place, 0, 0, [(2, 3), (0, 4)], value))
    plain = checksums(engine)[0]
    engine.client.patch([shares])
    before = checksums(engine)[0]
    assert (before != plain).all(axis=0).nonzero()[0][0] == place
    engine.client.patch([])
    engine.rules({})
    engine.add(PROMPT)
    begin(engine, stop="place", place=place)
    engine.client.patch([shares])
    during = resume(engine).checksums
    engine.client.patch([])
    assert (during == before).all()


def test_an_interrupt_stops_all_ranks_at_one_operation(engine: Engine) -> None:
    """Interrupts at random moments of many passes: no rank stops apart, and what is computed is the same."""
    passes = 12
    expected = checksums(engine, passes)
    engine.rules({})
    engine.add(PROMPT)
    chance, interrupted, found = random.Random(0), 0, []
    for number in range(passes):
        if number == 0:
            engine.client.interrupt()  # once for certain: it is there before the pass begins
        command = RunStep(pause=PauseSpec())
        engine.client.send(command)
        time.sleep(chance.random() ** 3 * 0.01)
        engine.client.interrupt()
        reports = engine.client.collect(command, 60)
        engine.client.clear_interrupt()
        while isinstance(reports[0], PauseReport):
            interrupted += 1
            assert {(one.pause.place, one.pause.reason) for one in reports} == {
                (reports[0].pause.place, "interrupt")
            }
            reports = engine.client.call(ResumeStep(PauseSpec()))
        found.append(Pass(reports, engine.specs).checksums)
    assert interrupted > 0
    assert (np.stack(found) == expected).all()


def test_a_pause_reports_what_has_passed(engine: Engine) -> None:
    """At every operation: the statistics, checksums and tensors of the taps up to it, as the finished pass has them."""
    engine.capture("layers.0.attn.probs", "layers.1.attn.q_proj", "logits", statistics=True)
    reported: dict[int, list[PauseReport]] = {}
    reports = engine.client.call(RunStep(pause=PauseSpec("operation")))
    while isinstance(reports[0], PauseReport):
        reported[reports[0].pause.place] = reports
        reports = engine.client.call(ResumeStep(PauseSpec("operation")))
    assert list(reported) == list(range(len(engine.specs)))
    for place, pauses in reported.items():
        for report, whole in zip(pauses, reports, strict=True):
            for found, final in ((report.stats, whole.stats), (report.checksums, whole.checksums)):
                assert found is not None
                assert final is not None
                np.testing.assert_array_equal(found.array[: place + 1], final.array[: place + 1])
            assert np.isnan(report.stats.array[place + 1 :]).all()
            assert not report.checksums.array[place + 1 :].any()
            assert [one.ids for one in report.sequences] == [PROMPT]
            assert [one.positions for one in report.sequences] == [list(range(len(PROMPT)))]
            known = {one.tap for one in whole.tensors}
            # What it stood at before may have been patched since, and comes again.
            assert {one.tap for one in report.tensors} == known & {place - 1, place}
    for rank, whole in enumerate(reports):
        assert [engine.specs[one.tap].name for one in whole.tensors] == [
            "layers.0.attn.probs", "layers.1.attn.q_proj", "logits",
        ]  # fmt: skip
        for one in whole.tensors:
            seen = next(found for found in reported[one.tap][rank].tensors if found.tap == one.tap)
            np.testing.assert_array_equal(seen.value.array, one.value.array)


def test_a_pause_reports_what_was_captured_since_the_last_one(engine: Engine) -> None:
    engine.capture("layers.*.attn.probs", statistics=False)
    places = {spec.name: i for i, spec in enumerate(engine.specs)}
    probs = [places[f"layers.{i}.attn.probs"] for i in range(3)]
    (first, *_) = engine.client.call(RunStep(pause=PauseSpec("place", probs[1])))
    assert (first.stats, first.checksums) == (None, None)
    assert [one.tap for one in first.tensors] == probs[:2]
    (second, *_) = engine.client.call(ResumeStep(PauseSpec("place", places["logits"])))
    assert [one.tap for one in second.tensors] == probs[
        1:
    ]  # the one it stood at could still have been patched
    assert [one.tap for one in resume(engine).reports[0].tensors] == probs


def test_the_seconds_of_a_step_are_those_it_ran(engine: Engine) -> None:
    began = time.perf_counter()
    begin(engine, stop="operation")
    time.sleep(1.5)
    (report, *_) = resume(engine).reports
    assert report.seconds <= time.perf_counter() - began - 1.5


def test_no_rank_counts_its_wait_for_one_that_goes_on_late(engine: Engine) -> None:
    """The last rank hears a second after the others that the pass goes on."""
    began = time.perf_counter()
    begin(engine, stop="operation")
    late = engine.client.pids[-1]
    os.kill(late, signal.SIGSTOP)
    try:
        engine.client.send(command := ResumeStep(PauseSpec()))
        time.sleep(1.0)
    finally:
        os.kill(late, signal.SIGCONT)
    reports = engine.client.collect(command, 60)
    assert max(report.seconds for report in reports) <= time.perf_counter() - began - 1.0


@pytest.mark.parametrize("name", ["deepseek-v2", "qwen3-next", "gpt-oss"])
def test_models_that_cache_latents_or_states_are_stopped_at_every_operation(
    name: str, engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    """A layer that has no cached keys holds its rows once its latents, or its state, are written."""
    engine = engine_of(1)
    engine.load(variant(name))
    engine.add(PROMPT)
    pauses = list(stops(engine, stop="operation"))
    assert len(pauses) >= len({spec.name for spec in engine.specs if spec.name.endswith("_norm")})
    for layer in range(3):
        lengths = [
            one.kv_lens for one in pauses if engine.specs[one.place].name.startswith(f"layers.{layer}.")
        ]
        assert list(lengths[0].values()) == list(lengths[-1].values()) == [len(PROMPT)]
