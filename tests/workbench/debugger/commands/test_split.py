"""`split`: this branch beside another; `extend`: the other one runs on; `print … step … branch …`."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.workbench.debugger.answers import Position, TensorValue
from lockstep.workbench.debugger.commands.split import SplitResult
from lockstep.workbench.debugger.errors import CommandError, DebuggerError
from lockstep.workbench.debugger.host.replay import open_replay
from tests.workbench.debugger.conftest import Live, finish, texts


def test_split_reports_tokens_and_the_first_operation_live_and_in_replay(live: Live) -> None:
    debugger = live(tp=2)
    with pytest.raises(DebuggerError, match="nothing was run yet"):
        debugger.execute("split")
    debugger.execute("next")
    with pytest.raises(DebuggerError, match="there is nothing to put beside this branch"):
        debugger.execute("split")
    texts(debugger, "toggle load_bias false")
    debugger.execute("goto 0")
    found = debugger.execute("split")
    assert isinstance(found, SplitResult)
    assert (found.other, found.names, found.first) == (0, ("load_bias=false", "main"), "layers.0.attn.q_proj")
    assert found.divergence is not None
    tokens = [debugger.timeline.tokens(branch) for branch in (1, 0)]
    parted = next((i for i, (a, b) in enumerate(zip(*tokens, strict=False)) if a != b), None)
    assert found.parted == parted
    # Inside a step it reports on the last one that is over, and finishes nothing.
    debugger.execute("goto 8")
    debugger.execute("stepi")
    assert isinstance(inside := debugger.execute("split main"), SplitResult)
    assert inside.step == 8
    assert debugger.position.place is not None
    with pytest.raises(CommandError, match="is the branch itself"):
        debugger.execute("split 1")
    path = finish(debugger)
    with open_replay(path) as replay:
        texts(replay, "branch 1", "goto 0")
        again = replay.execute("split")
        assert isinstance(again, SplitResult)
        assert (again.first, again.parted, again.headline, again.divergence) == (
            found.first, found.parted, found.headline, found.divergence,
        )  # fmt: skip


def test_with_several_others_it_asks(live: Live) -> None:
    debugger = live()
    texts(
        debugger,
        "next",
        "toggle load_bias false --stay",
        "branch main",
        "toggle mask none --stay",
        "branch main",
    )
    with pytest.raises(CommandError, match=r"split with which\? `split load_bias=false`, `split mask=none`"):
        debugger.execute("split")


def test_extend_runs_another_branch_on_and_stays(live: Live) -> None:
    debugger = live()
    texts(debugger, "next 3", "toggle load_bias false --stay", "next 2", "branch main", "goto 1")
    assert (
        debugger.execute("extend load_bias=false 2").to_text()
        == "branch 1 (load_bias=false) ran on to step 6"
    )
    assert debugger.position == Position(0, 1)
    assert (debugger.timeline.last(0), debugger.timeline.last(1)) == (2, 6)
    # Inside a step of one branch the other can run on as well; the step is finished for it.
    texts(debugger, "goto 2", "stepi", "extend 1")
    assert debugger.position.branch == 0
    assert debugger.timeline.last(1) == 7
    # It is what `next` would have done there.
    tokens = debugger.timeline.tokens(1)
    texts(debugger, "goto 1", "toggle load_bias false --stay")
    assert debugger.timeline.tokens(debugger.position.branch)[:2] == tokens[:2]


def test_print_elsewhere(live: Live) -> None:
    debugger = live()
    texts(debugger, "next 3", "toggle load_bias false --stay")
    tap = "layers.0.attn.q_proj"
    here, there = (debugger.execute(f"print {tap} step 1 branch {name}") for name in ("1", "main"))
    assert isinstance(here, TensorValue)
    assert isinstance(there, TensorValue)
    assert not np.array_equal(here.array, there.array)
    texts(debugger, "branch main", "goto 1")
    again = debugger.execute(f"print {tap}")
    assert isinstance(again, TensorValue)
    assert np.array_equal(again.array, there.array)
    assert again.source == "session", "what was computed again is kept"
    with pytest.raises(CommandError, match="step 9 of branch 0 was not run yet"):
        debugger.execute(f"print {tap} step 9")
