"""What the layers would choose, and what the ranks hold of the weights: asked of a live run, kept for a replay."""

from __future__ import annotations

import pytest

from lockstep.workbench.debugger.answers import TableResult
from lockstep.workbench.debugger.errors import NotCaptured
from lockstep.workbench.debugger.host.replay import open_replay
from tests.workbench.debugger.conftest import Live, finish


@pytest.mark.parametrize("tp", [1, 2])
def test_the_last_layer_chooses_as_the_step_did_and_a_replay_has_it(live: Live, tp: int) -> None:
    debugger = live(tp=tp)
    debugger.execute("next 3")
    layers = debugger.engine.inferior.model.num_layers
    for step in (0, 2):
        debugger.execute(f"goto {step}")
        table = debugger.execute("lens")
        assert isinstance(table, TableResult)
        assert [row[0] for row in table.rows] == ["embed", *(f"layers.{i}" for i in range(layers))]
        event = debugger.session.events(kind="lens")[-1]
        last, reported = event.data["layers"][-1], debugger.timeline.sequence(0, step)
        assert event.step == step
        assert reported is not None
        assert last["ids"] == list(reported.topk_ids)[: len(last["ids"])]
        assert last["logits"] == pytest.approx(list(reported.topk_logits)[: len(last["logits"])], abs=1e-5)
        assert last["logsumexp"] == pytest.approx(reported.logsumexp, abs=1e-5)
    shown = debugger.execute("lens").to_text()
    with open_replay(finish(debugger)) as replay:
        replay.execute("goto 2")
        assert replay.execute("lens").to_text() == shown
        replay.execute("goto 1")
        with pytest.raises(NotCaptured, match="`lens` in the live run"):
            replay.execute("lens")


def test_a_lens_of_a_shared_step_is_found_from_the_branch_too(live: Live) -> None:
    debugger = live()
    for line in ("next 2", "toggle mask none --keep-cache --stay", "goto 1", "lens"):
        debugger.execute(line)
    with open_replay(finish(debugger)) as replay:
        replay.execute("goto 1")
        assert replay.execute("lens").to_text().startswith("step 1")


def _unequal(table: object) -> set[tuple[str, int, str]]:
    assert isinstance(table, TableResult)
    return {(row[0], row[1], row[-1]) for row in table.rows if row[-1] != "equal"}


def test_weights_are_held_against_the_checkpoint_branch_by_branch(live: Live) -> None:
    debugger = live(tp=2)
    debugger.execute("next")
    assert _unequal(debugger.execute("info weights")) == set()
    debugger.execute("toggle load_bias false --stay")
    broken = _unequal(debugger.execute("info weights"))
    assert broken
    assert all(name.endswith("_proj.bias") and how == "different" for name, _, how in broken)
    debugger.execute("branch 0")
    assert _unequal(debugger.execute("info weights")) == set(), "the ranks hold what the branch states"
    debugger.execute("toggle qkv_shard_dim 1 --stay")
    cut = _unequal(debugger.execute("info weights"))
    assert ("model.layers.0.self_attn.q_proj.weight", 1, "different") in cut
    with open_replay(finish(debugger)) as replay:
        assert _unequal(replay.execute("info weights")) == set()
        replay.execute("branch 1")
        assert _unequal(replay.execute("info weights")) == broken


def test_a_head_that_no_checkpoint_fills_is_absent_from_it(live: Live) -> None:
    debugger = live()
    for line in ("next", "toggle lm_head missing --stay"):
        debugger.execute(line)
    assert ("lm_head.weight", 0, "absent") in _unequal(debugger.execute("info weights"))
