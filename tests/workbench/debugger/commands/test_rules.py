"""Forks: toggles, patches, sampling; what branches share, and that the old one stays as it was."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions.meta import CaptureMeta, ConfigMeta, ModelMeta, SamplingMeta, SequenceMeta, SessionMeta
from lockstep.workbench.debugger.answers import Position, Stop, TableResult
from lockstep.workbench.debugger.commands.script import run_line, script_of
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.tensors import parts_of, whole_of
from lockstep.workbench.debugger.errors import CommandError, DebuggerError
from lockstep.workbench.debugger.events import StepEvent
from lockstep.workbench.debugger.host.replay import open_replay
from tests.workbench.debugger.conftest import PROMPT, Live, finish, texts

pytestmark = pytest.mark.sampled_file(2)


def sums(debugger: Debugger, branch: int, step: int) -> np.ndarray:
    found = debugger.timeline.record(branch, step).checksums
    assert found is not None
    return found


def test_a_toggle_runs_the_prefix_again_on_the_same_tokens(live: Live) -> None:
    debugger = live(tp=2)
    texts(debugger, "next 4", "toggle load_bias false --stay", "next 2")
    timeline = debugger.timeline
    assert [timeline.sequence(1, k).emitted for k in range(4)] == timeline.tokens(0)
    assert (sums(debugger, 1, 0) != sums(debugger, 0, 0)).any()
    place = int((sums(debugger, 1, 0) != sums(debugger, 0, 0)).any(axis=1).argmax())
    assert timeline.places.names[place] == "layers.0.attn.q_proj"
    fresh = live(tp=2, rules={"load_bias": "false"})
    fresh.execute("next")
    assert (sums(fresh, 0, 0) == sums(debugger, 1, 0)).all()


def test_toggled_back_is_what_it_was(live: Live) -> None:
    debugger = live(rules={"mask": "none"})
    texts(
        debugger,
        "next 3",
        "toggle mask filled --stay",
        "toggle load_bias false --stay",
        "toggle mask none --stay",
    )
    assert debugger.timeline.line(1).rules == {}
    assert (debugger.timeline.line(3).parent, debugger.timeline.line(3).rules) == (
        0,
        {"mask": "none", "load_bias": "false"},
    ), "a rule that was switched before another one: forked from where it was switched"
    texts(debugger, "toggle load_bias true")
    assert debugger.position == Position(0, 2), "switched back: the parent branch, no third one"
    assert len(debugger.timeline.lines) == 4


def test_keep_cache_shares_the_steps_before(live: Live) -> None:
    debugger = live()
    texts(debugger, "next 3", "toggle rope swallowed --keep-cache --stay", "next 2")
    line = debugger.timeline.line(1)
    assert (line.fork_step, line.steps) == (3, 5)
    debugger.session.refresh()
    assert debugger.session.steps(1) == range(5)
    texts(debugger, "branch 0", "next 2", "branch 1", "goto 3")
    place = debugger.timeline.places.exact("layers.0.attn.k_cache")
    assert (sums(debugger, 0, 3)[:place] != sums(debugger, 1, 3)[:place]).any()
    assert debugger.executor is not None
    debugger.executor.reach(1, 5)  # verifies every step on the way
    debugger.executor.forget_cache()
    debugger.executor.reach(1, 5)  # from the prompt: old rules first, then the new ones


def test_keep_cache_can_read_weights_again_but_not_reshape_the_cache(live: Live) -> None:
    debugger = live()
    texts(debugger, "next 2", "toggle load_bias false --keep-cache --stay", "next")
    with pytest.raises(CommandError, match="cache's shape"):
        debugger.execute("toggle cache_heads repeated --keep-cache")
    assert debugger.timeline.line(debugger.position.branch).id == 1


def test_a_toggle_inside_a_step_stands_where_it_stood(live: Live) -> None:
    debugger = live(rules={"mask": "additive"})
    texts(debugger, "catch nan", "continue")
    stop = debugger.execute("toggle mask filled")
    assert isinstance(stop, Stop)
    assert (stop.branch, stop.step, stop.tap) == (1, 0, "layers.0.attn.scores")
    assert debugger.execute("expect nan == 0").to_text().startswith("ok")
    debugger.session.refresh()
    assert debugger.session.steps(0) == debugger.session.steps(1) == range(9), "both ran ahead"


def test_a_toggle_stops_at_the_first_different_token(live: Live) -> None:
    debugger = live(tp=2)
    stop = [debugger.execute(line) for line in ("next 2", "toggle load_bias false")][-1]
    timeline = debugger.timeline
    assert timeline.last(0) == timeline.last(1) == 9, "8 steps beyond the fork, both"
    ours, theirs = timeline.tokens(1), timeline.tokens(0)
    first = next(k for k in range(10) if ours[k] != theirs[k])
    assert first >= 2
    assert debugger.position == Position(1, first)
    label = debugger.texts.label
    assert stop.to_text() == (
        f"branch 1 (load_bias=false): differs from main at step {first}: “{label(ours[first])}” instead of"
        f" “{label(theirs[first])}”"
    )
    debugger.execute("next 20")
    back = debugger.execute("toggle load_bias true").to_text()
    assert back.startswith(f"back on branch 0 (main): differs from load_bias=false at step {first}: ")
    assert debugger.position == Position(0, 9)
    assert back.endswith("at step 9")
    debugger.execute("goto 0")
    debugger.execute("toggle rope interleaved")
    assert timeline.last(2) == timeline.last(0) == 9, "as far as the old branch went"
    with open_replay(finish(debugger)) as replay:
        texts(replay, "next 2")
        again = replay.execute("toggle load_bias false")
        assert again.to_json() == stop.to_json(), "a replay reports the same"
        assert (
            replay.execute("toggle load_bias true").to_text().startswith("back on branch 0 (main): differs")
        )


def test_a_toggle_that_changes_no_token_reports_it(live: Live) -> None:
    debugger = live()
    text = texts(debugger, "next 3", "toggle rope interleaved")[-1]
    found = re.fullmatch(
        r"branch 1 \(rope=interleaved\): same tokens as main for 8 steps, the likeliest tokens' logits differ by at"
        r" most ([\d.e+-]+); still at step 2",
        text,
    )
    assert found is not None, text
    assert float(found[1]) > 0
    assert debugger.timeline.tokens(0) == debugger.timeline.tokens(1)
    assert debugger.position == Position(1, 2)


def test_ctrl_c_stops_running_ahead(live: Live) -> None:
    debugger = live()
    debugger.execute("next 3")
    seen: list[object] = []

    def after(steps: int) -> None:
        def interrupt(event: object) -> None:
            seen.append(event)
            if [type(one) for one in seen].count(StepEvent) == steps:
                debugger.interrupt()

        seen.clear()
        debugger.events = interrupt

    after(2)
    stop = debugger.execute("toggle rope interleaved")
    assert stop.to_text().startswith(
        "interrupted: rope=interleaved is not switched yet, main ran ahead to step"
    )
    assert debugger.position == Position(0, 2)
    assert len(debugger.timeline.lines) == 1
    main = debugger.timeline.last(0)
    after(10 - main + 3 + 2)
    stop = debugger.execute("toggle rope interleaved")
    assert isinstance(stop, Stop)
    assert (stop.reason, stop.branch) == ("pause", 1)
    assert 3 <= debugger.timeline.last(1) < debugger.timeline.last(0) == 10


def test_a_breakpoint_stops_the_new_branch_and_not_the_old(live: Live) -> None:
    debugger = live()
    texts(debugger, "next 3", "break layers.1.attn.probs if step == 5")
    stop = debugger.execute("toggle rope interleaved")
    assert isinstance(stop, Stop)
    assert (stop.reason, stop.branch, stop.step, stop.tap) == ("breakpoint", 1, 5, "layers.1.attn.probs")
    assert debugger.timeline.last(0) == 10


@pytest.mark.parametrize(
    "tap",
    ["layers.1.attn.q_proj", "layers.0.attn.o_proj.partial", "layers.1.attn_norm", "layers.0.attn.probs"],
)
def test_a_patch_sets_the_global_tensor_whatever_the_layout(live: Live, tap: str) -> None:
    debugger = live(tp=2)
    texts(debugger, "next 2")
    before, _ = whole_of(debugger, parts_of(debugger, tap))
    index = "[6, 0, :]" if before.ndim == 3 else "[0, 40:44]"
    debugger.execute(f"patch {tap}{index} = 0.25")
    after, note = whole_of(debugger, parts_of(debugger, tap))
    expected = before.copy()
    expected[(6, 0) if before.ndim == 3 else (0, slice(40, 44))] = 0.25
    np.testing.assert_array_equal(after, expected)
    assert note == ""
    place = debugger.timeline.places.exact(tap)
    assert (sums(debugger, 0, 1)[:place] == sums(debugger, 1, 1)[:place]).all()
    assert (sums(debugger, 0, 1)[place] != sums(debugger, 1, 1)[place]).any()
    assert debugger.timeline.line(1).fork_step == 1


def test_patches_survive_a_re_execution_and_the_saved_session(live: Live) -> None:
    debugger = live(tp=2)
    texts(debugger, "next 2", "patch layers.0.mlp.act[0, :8] = 3", "next 2")
    assert debugger.executor is not None
    debugger.executor.forget_cache()
    debugger.executor.reach(1, 4)
    from lockstep.workbench.debugger.core.timeline import open_timeline

    debugger.session.refresh()
    again = open_timeline(debugger.session)
    assert [p.step for p in again.line(1).patches] == [1]
    np.testing.assert_array_equal(
        again.line(1).patches[0].parts[0][1], debugger.timeline.line(1).patches[0].parts[0][1]
    )


def test_a_seed_forks_from_the_next_token(live: Live) -> None:
    debugger = live()
    texts(debugger, "next 3", "set temperature 1.5", "set seed 5", "next 8")
    tokens = debugger.timeline.tokens(2)
    texts(debugger, "branch 0", "goto 2", "set temperature 1.5", "set seed 5", "next 8")
    assert debugger.timeline.tokens(debugger.position.branch) == tokens
    assert tokens[:3] == debugger.timeline.tokens(0)[:3]
    assert tokens != debugger.timeline.tokens(0)[: len(tokens)]


def test_checkpoints_and_restart(live: Live) -> None:
    debugger = live()
    texts(debugger, "next 2", "checkpoint before the fall", "next 3")
    stop = debugger.execute("restart 1")
    assert isinstance(stop, Stop)
    assert stop.step == 1
    assert "before the fall" in debugger.execute("info checkpoints").to_text()
    assert debugger.execute("restart").to_json()["reason"] == "entry"
    with pytest.raises(CommandError, match="no checkpoint 9"):
        debugger.execute("restart 9")


@pytest.mark.slow
def test_a_script_of_the_journal_gives_the_same_checksums(live: Live, tmp_path: Path) -> None:
    debugger = live(tp=2)
    texts(
        debugger, "break layers.1.attn.probs if step == 2", "continue", "commands 1\nframe\nend", "stepi 3",
        "toggle rope interleaved", "next 2", "patch layers.0.mlp.act[0, 3] = -1", "reverse-next 2", "next 3",
        "set temperature 1", "next 3", "branch 0", "continue", "next 2", "note done",
    )  # fmt: skip
    script = tmp_path / "again.lockstep"
    script.write_text(debugger.execute("export script").to_text())
    again = live(tp=2)
    again.execute(f"source {script}")
    assert again.timeline.lines.keys() == debugger.timeline.lines.keys()
    assert again.position == debugger.position
    for line in debugger.timeline.lines.values():
        assert again.timeline.line(line.id).steps == line.steps
        for step in range(line.steps):
            assert (sums(again, line.id, step) == sums(debugger, line.id, step)).all()
    assert debugger.timeline.prompt() == PROMPT


def test_an_interrupted_fork_is_a_command_that_leads_there_again(live: Live, tmp_path: Path) -> None:
    debugger = live()
    debugger.execute("next 6")
    seen: list[type] = []

    def after_two(event: object) -> None:
        seen.append(type(event))
        if seen == [StepEvent, StepEvent]:
            debugger.interrupt()

    debugger.events = after_two
    stop = debugger.execute("toggle rope interleaved --stay")
    assert isinstance(stop, Stop)
    assert (stop.reason, stop.branch, stop.step) == ("pause", 1, 1)
    debugger.events = lambda event: None
    debugger.execute("next 2")
    script = script_of(debugger)
    assert script.splitlines()[2:] == ["toggle rope interleaved --stay", "goto 1", "next 2"]


def test_the_first_line_of_a_script_starts_the_same_run() -> None:
    meta = SessionMeta(
        model=ModelMeta(path="/models/a b"),
        config=ConfigMeta(tp=2, dtype="float32"),
        rules={"mask": "additive"},
        sequences={
            0: SequenceMeta(prompt_ids=(1, 2), sampling=SamplingMeta(temperature=0.5, seed=7)),
            1: SequenceMeta(prompt_ids=(3,)),
        },
        capture=CaptureMeta(full=("layers.0.*",)),
    )
    assert run_line(meta) == (
        "lockstep run '/models/a b' --tp 2 --dtype float32 --fault mask=additive --ids 1,2 --ids 3"
        " --temperature 0.5 --seed 7 --capture 'layers.0.*'"
    )
    assert run_line(SessionMeta(model=ModelMeta(name="demo", path="/somewhere"))) == "lockstep run demo"


def test_diff_shows_a_tap_a_row_the_first_on_top(live: Live) -> None:
    debugger = live(tp=2)
    texts(debugger, "next 3", "toggle rope interleaved --stay")
    table = debugger.execute("diff 0 1")
    assert isinstance(table, TableResult)
    assert "the first: layers.0.attn.q_rope at step 0" in table.title
    assert [row[0] for row in table.rows] == sorted(
        {row[0] for row in table.rows}, key=debugger.timeline.places.exact
    )
    first = dict(zip(table.columns, table.rows[0], strict=True))
    assert (first["first step"], first["steps"], first["ranks"]) == (0, 3, "all")
    assert "→" in first["note"], "without tensors the statistic that has moved most is shown"
    probs = dict(zip(table.columns, next(r for r in table.rows if r[0].endswith("probs")), strict=True))
    assert probs["max abs"] > 0
    assert debugger.execute("diff main 0").to_text().endswith("no difference")


def test_a_script_writes_nothing_but_new_files_here(live: Live, tmp_path: Path) -> None:
    debugger = live()
    target = tmp_path / "precious"
    target.write_text("mine")
    script = tmp_path / "hostile"
    script.write_text(f"export script {target}\n")
    with pytest.raises(DebuggerError, match="only export to new files"):
        debugger.execute(f"source {script}")
    with pytest.raises(DebuggerError, match="exists"):
        debugger.execute(f"export script {target}")
    assert target.read_text() == "mine"
