"""Pausing inside a pass: all ranks at the same operation, nothing disturbed by it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import RequestError
from engine.ranks.wire import pack_array, unpack_array
from tests.engine.harness import Engine, Pass

PROMPT = [3, 130, 17, 99, 4]
Tree = list[Any]


@pytest.fixture(params=[1, 2])
def engine(
    request: pytest.FixtureRequest, engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> Iterator[Engine]:
    """A model with statistics on, so that passes can be compared bit by bit."""
    engine = engine_of(request.param)
    engine.load(variant("qwen2-tied"))
    engine.watch(statistics=True)
    engine.add(PROMPT)
    yield engine
    with suppress(RequestError):  # there is nothing to abandon, unless a test failed while paused
        engine.client.call("abandon")


def begin(engine: Engine, do: str = "step", **pause: Any) -> list[dict[str, Any]]:
    """Start a pass, or resume it, until it stops or ends."""
    extra = {"forced": {}} if do == "step" else {}
    return engine.client.call(do, pause=pause, **extra)


def stops(engine: Engine, **pause: Any) -> Iterator[dict[str, Any]]:
    """Rank 0's answers at each stop of one pass, all ranks having stopped at the same place."""
    answers = begin(engine, **pause)
    while answers[0].get("paused"):
        assert len({answer["place"] for answer in answers}) == 1
        yield answers[0]
        answers = begin(engine, "resume", **pause)
    engine.last = Pass(answers, engine.specs)


def names(engine: Engine, answers: Iterator[dict[str, Any]]) -> list[str]:
    return [engine.specs[answer["place"]].name for answer in answers]


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
    in_layer_1: Tree = {"id": 5, "places": [norms[1]]}
    decode_only: Tree = {"id": 6, "places": norms, "when": [">=", ["name", "step"], 1]}
    first, second = ([*stops(engine, breaks=[in_layer_1, decode_only])] for _ in range(2))
    assert [(s["place"], s["breaks"], s["reason"]) for s in first] == [(norms[1], [5], "breakpoint")]
    assert [s["breaks"] for s in second] == [[6], [5, 6], [6]]


def test_a_condition_that_holds_on_one_rank_stops_all(engine: Engine) -> None:
    tp = engine.client.config.tp
    place = [spec.name for spec in engine.specs].index("layers.0.attn.q_proj")
    conditional = {"id": 1, "places": [place], "when": ["==", ["name", "rank"], tp - 1]}
    bound = {"id": 2, "places": [place], "rank": 0}
    answers = begin(engine, breaks=[conditional, bound])
    assert [answer["breaks"] for answer in answers] == [[1, 2]] * tp
    here = [sorted(answer["here"]) for answer in answers]
    assert here == ([[1, 2]] if tp == 1 else [[2], [1]])
    assert begin(engine, "resume")[0]["phase"] == "prefill"


def test_conditions_see_the_statistics_of_the_tap(engine: Engine) -> None:
    """Infinities that the causal mask puts into the scores of a prefill are no infinities."""
    scores = [i for i, spec in enumerate(engine.specs) if spec.name.endswith("attn.scores")]
    assert not [*stops(engine, breaks=[{"id": 1, "places": scores, "when": [">", ["name", "inf"], 0]}])]
    highest = engine.last.statistics[:, scores[0], 1].max()
    engine.rules({})
    engine.add(PROMPT)
    above, below = ([">", ["name", "max"], float(highest) + d] for d in (0.001, -0.001))
    assert not [*stops(engine, breaks=[{"id": 1, "places": scores[:1], "when": above}])]
    engine.rules({})
    engine.add(PROMPT)
    assert len([*stops(engine, breaks=[{"id": 1, "places": scores[:1], "when": below}])]) == 1


@pytest.mark.parametrize("tree", [["name", "nonsense"], ["<", 1], [], ["exec", 1, 2], "text", None])
def test_a_malformed_condition_is_refused_by_all_ranks_alike(engine: Engine, tree: Any) -> None:
    broken = {"id": 1, "places": [0], "when": ["not", tree], "rank": 0}
    with pytest.raises(RequestError, match=r"condition"):
        begin(engine, breaks=[broken])
    assert begin(engine, stop="place", place=0)[0]["paused"]
    with pytest.raises(RequestError, match=r"condition"):
        begin(engine, "resume", breaks=[broken])
    assert begin(engine, "resume")[0]["phase"] == "prefill"  # still paused, and goes on


def test_abandoning_leaves_no_trace(engine: Engine) -> None:
    expected = checksums(engine, passes=3)
    engine.rules({})
    engine.add(PROMPT)
    found = []
    for _ in range(3):
        engine.client.call("step", forced={}, pause={"stop": "place", "place": 40})
        assert engine.client.call("abandon")[0] == {"ok": True, "abandoned": True}
        found.append(engine.step())
    assert (np.stack([one.checksums for one in found]) == expected).all()
    assert found[0].sequences[0]["positions"] == [0, 1, 2, 3, 4]
    assert found[0].answers[0]["used"] == 1


def test_what_passed_can_be_read_and_what_has_not_cannot(engine: Engine) -> None:
    tap = "layers.1.attn.k_rope"
    place = [spec.name for spec in engine.specs].index(tap)
    engine.watch(tap, statistics=True)  # so that both passes take the explicit path through attention
    expected = engine.step().parts(tap)
    engine.rules({})
    engine.add(PROMPT)
    begin(engine, stop="place", place=place)
    read = engine.client.call("read", place=place, seq=0)
    assert all((unpack_array(a["tensor"])[0] == b).all() for a, b in zip(read, expected, strict=True))
    with pytest.raises(RequestError, match=r"layers\.1\.attn\.k_cache has not passed"):
        engine.client.call("read", place=place + 1, seq=0)
    with pytest.raises(RequestError, match="not possible while paused"):
        engine.add([1], seq=1)
    engine.client.call("abandon")


def test_looking_at_the_cache_does_not_disturb_the_pass(engine: Engine) -> None:
    """The rows of the pass under way lie in a buffer while it is paused between reading and attending."""
    engine.step()
    expected = engine.step().checksums
    engine.client.call("rewind", lengths={0: [len(PROMPT) + 1, len(PROMPT), len(PROMPT)]}, step=1)
    place = [spec.name for spec in engine.specs].index("layers.0.attn.v_cache")
    begin(engine, stop="place", place=place)
    engine.client.call("kv", layer=2, seq=0)
    assert (Pass(begin(engine, "resume"), engine.specs).checksums == expected).all()


@pytest.mark.parametrize("tap", ["layers.0.attn_norm", "layers.1.mlp.gate", "layers.2.mlp_residual"])
def test_a_patch_acts_before_and_while_paused_at_its_place(engine: Engine, tap: str) -> None:
    place = [spec.name for spec in engine.specs].index(tap)
    value = pack_array(np.full((1, 4), 7.0, np.float32), "float32")
    patch = {"tap": place, "seq": 0, "step": 0, "index": [[2, 3], [0, 4]], "value": value}
    plain = checksums(engine)[0]
    engine.client.call("patch", patches=[[patch], [patch]])
    before = checksums(engine)[0]
    assert (before != plain).all(axis=0).nonzero()[0][0] == place
    engine.client.call("patch", patches=[[], []])
    engine.rules({})
    engine.add(PROMPT)
    begin(engine, stop="place", place=place)
    engine.client.call("patch", patches=[[patch], [patch]])
    during = Pass(begin(engine, "resume"), engine.specs).checksums
    engine.client.call("patch", patches=[[], []])
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
        engine.client.send("step", forced={}, pause={"stop": "never"})
        time.sleep(chance.random() ** 3 * 0.01)
        engine.client.interrupt()
        answers = engine.client.collect(60)
        engine.client.clear_interrupt()
        while answers[0].get("paused"):
            interrupted += 1
            assert {(a["place"], a["reason"]) for a in answers} == {(answers[0]["place"], "interrupt")}
            answers = begin(engine, "resume", stop="never")
        found.append(Pass(answers, engine.specs).checksums)
    assert interrupted > 0
    assert (np.stack(found) == expected).all()
