"""Looking: where, frame, print, x, rank apply, info, display; and how commands are understood."""

from __future__ import annotations

import pytest

from lockstep.workbench.debugger.answers import Group, TableResult, TensorValue
from lockstep.workbench.debugger.core import registry
from lockstep.workbench.debugger.errors import CommandError
from tests.workbench.debugger.conftest import PROMPT, Live, texts


def test_where_reports_the_token_that_is_read_and_the_one_that_comes_out(live: Live) -> None:
    debugger = live(tp=2)
    assert "no token yet" in debugger.execute("where").to_text()
    debugger.execute("next 2")
    emitted = debugger.timeline.tokens(0)
    reported = debugger.execute("where").to_json()["data"]
    assert (reported["reads"], reported["token"]) == (f"‹{emitted[0]}›", f"‹{emitted[1]}›")
    debugger.execute("stepi")
    text = debugger.execute("where").to_text()
    assert text.startswith("step 2 (under way), at embed")
    assert f'reads "‹{emitted[1]}›" at position 6' in text
    texts(debugger, "next", "goto 0")
    text = debugger.execute("where").to_text()
    assert text.startswith("step 0 (the last is 2)")
    assert f'reads "‹{PROMPT[-1]}›"' in text


def test_one_rank_or_all_of_them(live: Live) -> None:
    debugger = live(tp=2)
    debugger.execute("next")
    whole = debugger.execute("frame layers.0.attn.q_proj")
    one = debugger.execute("frame layers.0.attn.q_proj rank 1")
    assert isinstance(whole, TableResult)
    assert isinstance(one, TableResult)
    assert one.rows == [whole.rows[1]]
    each = debugger.execute("rank apply all print layers.0.attn.q_proj[0]")
    rebuilt = debugger.execute("print layers.0.attn.q_proj[0]")
    assert isinstance(each, Group)
    assert isinstance(rebuilt, TensorValue)
    parts = [part.array.tolist() for part in each.parts if isinstance(part, TensorValue)]
    assert [number for part in parts for number in part] == rebuilt.array.tolist()
    assert "rank 1" in debugger.execute("rank apply 1 x logits[0, :2]").to_text()
    for line, message in (
        ("rank apply all where", "is the same on every rank"),
        ("rank apply 2 frame", "no rank 2"),
        ("frame logits rank 7", "no rank 7"),
        ("print layers.7.attn.q_proj", "did you mean"),
        ("x logits[0, 9999]", "out of range"),
        ("x logits whole", "not 'whole'"),
        ("info b", "ambiguous: blocks, breakpoints"),
        ("info kv layers.*", "takes no glob"),
    ):
        with pytest.raises(CommandError, match=message):
            debugger.execute(line)


def test_sequences_are_looked_at_one_by_one(live: Live) -> None:
    debugger = live(prompts=[[3, 14, 15], [92, 65]])
    debugger.execute("next")
    shapes = [debugger.execute(f"print layers.0.mlp.up seq {seq}").to_json()["shape"][0] for seq in (0, 1)]
    assert shapes == [3, 2]


def test_beginnings_of_words_will_do(live: Live) -> None:
    debugger = live()
    debugger.execute("next")
    assert debugger.execute("info br").to_text().startswith("no breakpoints")
    assert "o_proj.weight" in debugger.execute("info wei *.layers.0.*o_proj*").to_text()
    assert "no parameter is called x" in debugger.execute("info weights x").to_text()
    assert debugger.execute("print tokens").to_text() == f"tokens = {debugger.timeline.tokens(0)}"


def test_what_cannot_be_shown_is_not_displayed(live: Live) -> None:
    debugger = live()
    debugger.execute("next")
    with pytest.raises(CommandError):
        debugger.execute("display frame nowhere")
    assert debugger.execute("display").to_text() == "nothing is displayed"


def test_help_lists_every_command_under_its_group(live: Live) -> None:
    text = live().execute("help").to_text()
    assert [line for line in text.splitlines() if line in registry.GROUPS] == list(registry.GROUPS)
    assert all(f"  {one.usage}" in text for one in registry.commands().values())
    assert "break LOCATION [if CONDITION] [rank R]: stop at taps" in live().execute("help b").to_text()
