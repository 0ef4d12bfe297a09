"""A batch: every command means the chosen sequence, inside a step, between steps, and in a replay."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.workbench.debugger.answers import TableResult
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.errors import CommandError, DebuggerError
from lockstep.workbench.debugger.host.replay import open_replay
from tests.workbench.debugger.conftest import Live, finish, texts

PROMPTS = [[3, 14, 15], [92, 65]]


def where(debugger: Debugger) -> tuple[object, ...]:
    """Sequence, position and what is read, as `where` reports them."""
    reported = debugger.execute("where").to_json()["data"]
    return reported["sequence"], reported["position"], reported["reads"]


def alone(live: Live, prompt: list[int]) -> tuple[list[int], list[float]]:
    """What the prompt gives without others beside it: its tokens, and the first eight logits of its second step."""
    debugger = live(prompts=[prompt])
    debugger.execute("next 2")
    logits = debugger.execute("print logits[0, :8]").to_json()["data"]
    finish(debugger)
    return debugger.timeline.tokens(0), logits


@pytest.mark.parametrize("tp", [1, 2])
def test_every_command_means_the_chosen_sequence(live: Live, tp: int) -> None:
    expected = [alone(live, prompt) for prompt in PROMPTS]
    debugger = live(tp=tp, prompts=PROMPTS)
    assert debugger.execute("sequence 1").to_text() == "seq 1 of 2: nothing was run yet"
    debugger.execute("next 2")
    for seq, (tokens, logits) in enumerate(expected):
        debugger.execute(f"sequence {seq}")
        assert where(debugger) == (seq, len(PROMPTS[seq]), f"‹{tokens[0]}›")
        assert texts(debugger, "print tokens") == [f"tokens = {tokens}"]
        assert texts(debugger, "print position") == [f"position = {len(PROMPTS[seq])}"]
        assert texts(debugger, "print kv_len") == [f"kv_len = {len(PROMPTS[seq]) + 1}"]
        found = debugger.execute("print logits[0, :8]").to_json()["data"]
        assert np.allclose(found, logits, atol=1e-4)
        assert np.allclose(debugger.execute(f"print logits[0, :8] seq {1 - seq}").to_json()["data"],
                           expected[1 - seq][1], atol=1e-4)  # fmt: skip
        top = debugger.execute("topk 3")
        assert isinstance(top, TableResult)
        assert [row[0] for row in top.rows if row[-1]] == [tokens[1]]
        assert len(top.rows) == 3
        other = debugger.execute(f"topk 1 seq {1 - seq}")
        assert isinstance(other, TableResult)
        assert other.title == f"step 1, seq {1 - seq} of 2"
        kv = debugger.execute("info kv")
        assert isinstance(kv, TableResult)
        assert {(row[0], row[3]) for row in kv.rows} == {(seq, len(PROMPTS[seq]) + 1)}
        attended = debugger.execute("attn 0 0 99")
        assert isinstance(attended, TableResult)
        text = [f"‹{token}›" for token in [*PROMPTS[seq], tokens[0]]]
        assert [row[2] for row in sorted(attended.rows)] == text
        assert f"→ ‹{tokens[1]}›" in debugger.execute("lens").to_text()
        assert "of all 2 sequences" in debugger.execute("frame logits").to_text()


@pytest.mark.parametrize("tp", [1, 2])
def test_inside_a_step_and_in_a_replay_the_same_is_meant(live: Live, tp: int) -> None:
    debugger = live(tp=tp, prompts=PROMPTS)
    debugger.execute("next")
    first = [debugger.timeline.tokens(0, seq)[0] for seq in (0, 1)]
    debugger.execute("until layers.0.attn.scores")
    for seq in (1, 0):
        debugger.execute(f"sequence {seq}")
        assert where(debugger) == (seq, len(PROMPTS[seq]), f"‹{first[seq]}›")
        assert texts(debugger, "print kv_len") == [f"kv_len = {len(PROMPTS[seq]) + 1}"]
        shape = debugger.execute("print layers.0.attn.scores").to_json()["shape"]
        assert shape[1:] == [1, len(PROMPTS[seq]) + 1]
    debugger.execute("next")
    live_tokens = [debugger.timeline.tokens(0, seq) for seq in (0, 1)]
    replay = open_replay(finish(debugger))
    with replay:
        replay.execute("goto 1")
        for seq in (1, 0):
            replay.execute(f"sequence {seq}")
            assert where(replay) == (seq, len(PROMPTS[seq]), f"‹{first[seq]}›")
            assert texts(replay, "print tokens") == [f"tokens = {live_tokens[seq]}"]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_condition_means_the_sequence_that_was_chosen_when_it_was_set(live: Live, tp: int) -> None:
    debugger = live(tp=tp, prompts=PROMPTS)
    debugger.execute("sequence 1")
    debugger.execute("break logits if position == 4")
    debugger.execute("sequence 0")
    stop = debugger.execute("continue")
    assert debugger.position.step == 3, (
        "sequence 1 began with two tokens; sequence 0 is at position 4 in step 2"
    )
    assert stop.to_json()["reason"] == "breakpoint"
    shown = debugger.execute("info breakpoints")
    assert isinstance(shown, TableResult)
    assert shown.rows[0][list(shown.columns).index("sequence")] == 1
    debugger.execute("next")
    debugger.execute("reverse-continue")
    assert debugger.position.step == 3, "and on the record"
    assert debugger.timeline.places.name(debugger.position.place) == "logits"


def test_a_patch_is_of_the_chosen_sequence(live: Live) -> None:
    debugger = live(prompts=PROMPTS)
    texts(debugger, "next 2", "sequence 1", "patch layers.0.mlp.down = 0")
    assert debugger.position.branch == 1
    changed = [
        debugger.execute(f"print layers.0.mlp.down[0, 0] seq {seq}").to_json()["data"] for seq in (0, 1)
    ]
    assert changed[1] == [0.0]
    assert changed[0] != [0.0]


def test_the_list_and_what_is_refused(live: Live) -> None:
    debugger = live(prompts=PROMPTS)
    debugger.execute("next")
    listed = debugger.execute("sequence")
    assert isinstance(listed, TableResult)
    assert [row[:4] for row in listed.rows] == [["▸", 0, 3, "0"], ["", 1, 2, "0"]]
    for line in ("sequence 2", "topk seq 7", "attn 0 0 seq 2"):
        with pytest.raises(CommandError, match=r"there is no sequence .: sequences are 0 and 1"):
            debugger.execute(line)
    with pytest.raises(DebuggerError):
        debugger.execute("sequence one")
    assert any(event.text == "sequence 1" for event in _after(debugger, "sequence 1")), "a script has it"


def _after(debugger: Debugger, line: str) -> list:
    debugger.execute(line)
    debugger.session.refresh()
    return debugger.session.events(kind="command")
