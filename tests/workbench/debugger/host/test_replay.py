"""Replay: the conclusions of a live run, from its session alone, without torch; and its verification."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from docs.recordings import BUGS, RecordedBug, file_name
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.config import ModelConfig
from lockstep.sessions import Session, SessionError
from lockstep.sessions.verify import verify as verify_file
from lockstep.workbench.cli.main import run as run_command
from lockstep.workbench.debugger.answers import Expectation
from lockstep.workbench.debugger.commands.script import run_line, script_of
from lockstep.workbench.debugger.errors import NeedsEngine, NotCaptured
from lockstep.workbench.debugger.host.replay import open_replay, verify
from lockstep.workbench.models.capture import STATS
from lockstep.workbench.views.attention import attention
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where
from tests.preloaded import run_module
from tests.sessions.samples import put_meta
from tests.workbench.debugger.conftest import Live, finish, texts

ROOT = Path(__file__).resolve().parents[4]
RECORDED = ROOT / "sessions" / "recorded"

#: The debugger's main job: catch NaN, walk to its origin, toggle the fix, expect a match.
NAN_SCRIPT = """\
# an additive mask made by multiplying with -inf
catch nan
continue
expect reason == exception and tap == layers.0.attn.scores
expect nan > 0 and nan(layers.0.attn.q_rope) == 0
origin
expect origin == layers.0.attn.scores
toggle mask filled
expect nan == 0
disable
next 4
golden
expect golden == match
expect nan(logits) == 0
"""


def lockstep(*words: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return run_module(
        "lockstep.workbench.cli", *words, LOCKSTEP_CACHE_DIR=str(cache), LOCKSTEP_DATA_DIR=str(cache)
    )


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_the_nan_script_live_and_by_replay(checkpoint: Path, tmp_path: Path) -> None:
    script, session = tmp_path / "nan.lockstep", tmp_path / "nan.session"
    script.write_text(NAN_SCRIPT)
    live = lockstep(
        "run", str(checkpoint), "--ids", "3,14,15,92,65", "--tp", "2", "--fault", "mask=additive",
        "--script", str(script), "--batch", "--json", "--save", str(session), cache=tmp_path,
    )  # fmt: skip
    assert live.returncode == 0, live.stderr
    replayed = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, "replay", str(session), "--script", str(script), "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert replayed.returncode == 0, replayed.stderr
    assert conclusions(replayed.stdout) == conclusions(live.stdout)
    assert len(conclusions(live.stdout)) == 13
    done = lockstep("replay", str(session), "--verify", str(checkpoint), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "every checksum equal" in done.stdout


_WITHOUT_TORCH = """\
import sys
for name in ("torch", "transformers", "textual"):
    sys.modules[name] = None  # importing it raises
from lockstep.workbench.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


def conclusions(lines: str) -> list[dict[str, object]]:
    """What each command came to, without what only a live run knows."""
    return [
        {
            key: value
            for key, value in json.loads(line).items()
            if key not in ("golden_session", "description")
        }
        for line in lines.splitlines()
    ]


@pytest.mark.parametrize("bug", BUGS, ids=file_name)
def test_a_recorded_bug_replays_to_the_same_conclusions(bug: RecordedBug, tmp_path: Path) -> None:
    path = tmp_path / file_name(bug)
    path.write_bytes((RECORDED / file_name(bug)).read_bytes())
    with open_replay(path) as debugger:
        claims = []
        for line in script_of(debugger).splitlines():
            if line.startswith("#"):
                continue
            result = debugger.execute(line)
            if isinstance(result, Expectation):
                assert result.holds, result.to_text()
                claims.append(result.claim)
        assert claims == [
            f"golden == diverged and cause == {bug.cause}",
            f"tap == {bug.first} and step == {bug.fault.step}",
            "golden == match",
        ]
        assert len(debugger.session.events(kind="note")) == 3
        meta = debugger.session.meta
        assert (meta.model.name, meta.model.path) == ("demo", "demo")
        assert {"lockstep", "python", "torch", "transformers"} <= set(meta.versions)
        assert len(meta.model.checkpoint) == 32
        texts(debugger, "branch 0", f"goto {bug.fault.step}")
        first = debugger.execute("golden").to_json()["first_divergence"]
        assert (first["tap"], first["step"]) == (bug.first, bug.fault.step)
        assert debugger.execute("diagnose").to_json()["causes"][0]["name"] == bug.cause
    assert verify_file(path) == []


def test_the_recordings_are_described_and_small() -> None:
    readme = (RECORDED / "README.md").read_text()
    for bug in BUGS:
        assert file_name(bug) in readme
        assert (RECORDED / file_name(bug)).stat().st_size < 400_000
    assert {path.name for path in RECORDED.glob("*.session")} == {file_name(bug) for bug in BUGS}


def test_what_is_not_there_reports_how_to_have_it(live: Live) -> None:
    debugger = live(tp=2)
    texts(debugger, "next 3", "print layers.0.mlp.act[0, 0]")
    path = finish(debugger)
    with open_replay(path) as replay:
        replay.execute("goto 2")
        assert "layers.0.mlp.act[0, 0], step 2 = " in replay.execute("print layers.0.mlp.act[0, 0]").to_text()
        with pytest.raises(NotCaptured, match=r"--capture 'layers\.1\.mlp\.act'"):
            replay.execute("print layers.1.mlp.act")
        with pytest.raises(NotCaptured, match="`info weights` in the live run"):
            replay.execute("info weights")
        with pytest.raises(NotCaptured, match="`golden` does, in the live run"):
            replay.execute("golden")
        with pytest.raises(NeedsEngine, match=r"was not tried here.*lockstep run MODEL"):
            replay.execute("toggle mask none")
        assert "row sum" in replay.execute("attn 0 1").to_text(), "attention rows are captured by default"
        assert replay.execute("next").to_json()["reason"] == "end"
        assert "greyed" in replay.execute("info toggles").to_text()


def test_a_replay_goes_back_to_where_the_golden_was_left() -> None:
    with open_replay(RECORDED / "load_bias-false.session") as debugger:
        texts(debugger, "goto 1", "catch golden")
        stops = [debugger.execute("reverse-continue").to_json() for _ in range(2)]
    assert [(stop["reason"], stop["step"], stop["tap"]) for stop in stops] == [
        ("exception", 0, "layers.0.attn.q_proj"),
        ("entry", -1, None),
    ]


def test_a_replay_needs_no_tokenizer_to_show_tokens(tmp_path: Path) -> None:
    path = tmp_path / "moved.session"
    shutil.copyfile(RECORDED / "load_bias-false.session", path)
    with open_replay(path) as debugger:
        here = debugger.execute("goto 2").to_text(), debugger.execute("print text").to_text()
    put_meta(path, model_path=str(tmp_path / "gone"))
    with open_replay(path) as debugger:
        assert (debugger.execute("goto 2").to_text(), debugger.execute("print text").to_text()) == here


def test_the_prefill_has_all_rows_of_its_attention(live: Live) -> None:
    debugger = live(tp=2)
    debugger.execute("next")
    path = finish(debugger)
    with open_replay(path) as replay:
        replay.execute("goto 0")
        reported = replay.execute("print layers.0.attn.probs").to_text()
        assert "step 0: 8×5×5 float32" in reported
        assert "was captured" not in reported


def test_rows_that_there_was_no_room_for_are_reported_of(live: Live) -> None:
    """As float16 a row of a layer takes 8 heads × 10 keys × 2 bytes; the newest 8 of 10 rows are offered, and of their
    keys the strongest are kept."""
    debugger = live(tp=2, prompts=[list(range(10))])
    layers, row = debugger.engine.inferior.model.num_layers, 8 * 10 * 2
    debugger.engine.inferior.watch(replace(STATS, budget_bytes=2 * row * layers))
    debugger.execute("next 2")
    path = finish(debugger)
    with Session.open(path) as session:
        dropped = session.step(0).dropped
        assert "attention of sequence 0: the rows of the last 8 of 10 tokens" in dropped
        assert "layers.1.attn.probs of sequence 0: the 2 strongest of 10 positions" in dropped
        source = SessionSource(session)
        first = attention(source, Where(step=0), 1)
        assert first.values is not None
        assert (first.values.shape, first.first_query) == ((8, 8, 10), 2)
        assert first.dropped == "kept: the 2 strongest of 10 keys, the rows of the last 8 of 10 tokens"
        kept = session.capture("layers.1.attn.probs", step=0, rank=1)
        assert kept is not None
        reported = re.fullmatch(r":,-8:,\{(\d);(\d)\}", kept.slice)
        assert reported is not None
        shown = np.isfinite(first.values).any(axis=(0, 1))
        assert np.flatnonzero(shown).tolist() == [int(reported[1]), int(reported[2])]
        assert (first.values[4:, :, shown] == kept.array).all(), "each value at its own key"
        assert not any(" of " in line for line in session.step(1).dropped), "a row of decode fits"
        assert attention(source, Where(step=1), 1).dropped == first.dropped
    with open_replay(path) as replay:
        replay.execute("goto 0")
        reported_of = replay.execute("print layers.1.attn.probs").to_text()
        assert f"only [{kept.slice}] was captured" in reported_of


@pytest.mark.slow
def test_verify_runs_every_branch_again_and_finds_a_changed_checkpoint(
    live: Live, checkpoint: Path, tmp_path: Path
) -> None:
    debugger = live()
    texts(
        debugger, "next 2", "toggle rope interleaved", "next", "patch layers.1.mlp.act[0, :4] = 2", "set seed 4",
        "set temperature 1", "next 2", "toggle rope half_split --keep-cache", "next 2", "reverse-next 3",
        "branch 0", "goto 4",
    )  # fmt: skip
    path = finish(debugger)
    with Session.open(path) as session:
        reported = verify(session, checkpoint, _model(checkpoint))
        assert reported.divergences == ()
        assert reported.passes == sum(len(session.steps(b.id)) - b.fork_step for b in session.branches())
    changed = tmp_path / "changed"
    shutil.copytree(checkpoint, changed)
    weights = load_file(changed / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.bias"][3] += 1
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    with Session.open(path) as session:
        found = verify(session, changed, _model(changed))
    assert [text.partition(":")[0] for text in found.divergences][:2] == [
        "branch 0 (main)",
        "branch 1 (rope=interleaved)",
    ]
    ran = [line for line in debugger.timeline.lines.values() if line.steps > line.fork_step]
    assert len(found.divergences) == len(ran)
    assert found.to_text().endswith("recorded from another checkpoint")
    assert all("layers.1.attn.q_proj, rank 0" in text for text in found.divergences)


def _model(path: Path) -> ModelConfig:
    model, source = open_checkpoint(path)
    source.close()
    return model


def test_no_session_is_a_clear_refusal(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.session"
    foreign.write_bytes(b"not a session" * 100)
    with pytest.raises(SessionError, match="no Lockstep session"):
        open_replay(foreign)


def test_a_run_in_chunks_is_run_again_in_the_same(checkpoint: Path, tmp_path: Path) -> None:
    words = [
        "run",
        str(checkpoint),
        "--ids",
        "3,14,15,92,65",
        "--chunk",
        "2",
        "--save",
        str(tmp_path / "a.session"),
    ]
    assert run_command([*words, "--ex", "next 4", "--batch"]) == 0
    with Session.open(tmp_path / "a.session") as session:
        assert [len(session.step(step).sequences[0].ids) for step in session.steps()] == [2, 2, 1, 1]
        assert run_line(session.meta).count("--chunk 2") == 1
        found = verify(session, checkpoint, _model(checkpoint))
    assert (found.passes, found.unverifiable, found.divergences) == (4, 0, ())
