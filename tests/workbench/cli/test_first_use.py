"""What somebody who types the commands for the first time stumbles over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions import STATISTICS, SequenceStep, StepRecord, Tap
from lockstep.sessions.meta import ROW_HASHES, ROW_STATISTICS
from lockstep.workbench.cli.main import run
from lockstep.workbench.debugger.host.replay import open_replay
from tests.sessions.samples import create, record

pytestmark = pytest.mark.sampled_file(2)


def test_a_glob_that_fits_nothing_prints_no_header(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "demo", "--tensor", "nope"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "no tensor matches 'nope'" in err


def test_a_mistyped_command_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "gallery/mask-additive", "--batch", "--ex", "brek logits"]) == 2
    assert "there is no command 'brek': did you mean break or tbreak?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("maskadditive", "did you mean gallery/mask-additive?"),
        ("load_bias", "did you mean gallery/load_bias-false?"),
        ("zzz", "there are gallery/cache_heads-repeated, gallery/cache_reuse-false"),
    ],
)
def test_a_mistyped_name_of_the_gallery_is_guessed(
    name: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", f"gallery/{name}", "--batch"]) == 2
    shown = capsys.readouterr().err
    assert f"there is no gallery/{name}: {advice}" in shown


def test_where_nothing_is_saved_the_gallery_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_DATA_DIR", str(tmp_path))
    assert run(["sessions"]) == 0
    out, err = capsys.readouterr()
    assert "gallery" not in out
    assert "note: with the package come gallery/cache_heads-repeated, " in err


@pytest.mark.parametrize(
    ("words", "stated"),
    [
        (["check"], "Missing argument 'MODEL|SESSION'."),
        (["faults", "rope", "load_bias"], "Got unexpected extra argument(s) (load_bias)."),
        (["export", "a.session", "-o", "a.html"], "No such option: -o."),
    ],
)
def test_a_command_line_that_is_not_whole_names_its_help(
    words: list[str], stated: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert f"{stated} `lockstep {words[0]} --help` shows" in capsys.readouterr().err


def test_a_recording_that_holds_too_little_names_the_verdict_that_it_keeps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["diagnose", "gallery/load_bias-false"]) == 3
    shown = capsys.readouterr().err
    assert "embed: it was not captured whole; record it with `--capture full`" in shown
    assert "It keeps the verdict of an earlier comparison, diverged: `lockstep replay" in shown
    assert "load_bias-false.session --batch --ex golden` shows it" in shown


def test_a_replay_that_stands_before_its_first_step_reports_the_way_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["replay", "gallery/mask-additive", "--batch", "--ex", "topk"]) == 2
    shown = capsys.readouterr().err
    assert "a replay begins before step 0: `next` goes to it, `goto 11` to the last one" in shown


def test_a_tap_that_a_recorder_could_not_have_is_refused_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "an engine that computes attention in one kernel has no such tensor"
    path = tmp_path / "fused.session"
    with create(path, absent={"layers.0.attn.probs": why}) as writer:
        writer.step(0, record(0))
    for line in ("attn 0 0", "print layers.0.attn.probs", "break layers.0.attn.probs"):
        assert run(["replay", str(path), "--batch", "--ex", "next", "--ex", line]) == 2
        assert f"layers.0.attn.probs was not recorded: {why}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--fault", "--rule"])
def test_faults_are_completed(option: str) -> None:
    line = f"lockstep generate demo {option} ro"
    asked = {"_LOCKSTEP_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": "4"}
    done = subprocess.run(
        [sys.executable, "-m", "lockstep"], env=os.environ | asked, capture_output=True, text=True, check=True
    )
    assert {"rope=interleaved", "rope_theta=10000"} <= set(done.stdout.split())
    assert all(word.startswith("ro") for word in done.stdout.split())


def test_brackets_of_a_help_text_stay(capsys: pytest.CaptureFixture[str]) -> None:
    run(["import", "--help"])
    assert "[taps] and [layouts]" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_stepping_passes_over_rows_beside_a_tap(tmp_path: Path) -> None:
    names = ("embed", *(f"layers.0.attn_norm{end}" for end in ("", ROW_HASHES, ROW_STATISTICS)), "logits")
    path = tmp_path / "attached.session"
    stats = np.ones((len(names), 1, len(STATISTICS)), np.float32)
    with create(path, tuple(Tap(i, name, "replicate") for i, name in enumerate(names)), ranks=1) as writer:
        writer.step(
            0, StepRecord(0, "prefill", [SequenceStep(0, [1], range(1), [[1]], [0])], 0.1, stats=stats)
        )
    with open_replay(path) as debugger:
        stops = [debugger.execute("stepi").to_json()["tap"] for _ in range(3)]
        back = [debugger.execute("reverse-stepi").to_json()["tap"] for _ in range(2)]
        taps = debugger.execute("info taps").to_text()
    assert stops == ["embed", "layers.0.attn_norm", "logits"]
    assert back == ["layers.0.attn_norm", "embed"]
    assert "row_" not in taps


def test_a_recording_of_another_engine_names_a_command_that_keeps_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.sessions.meta import ForeignMeta

    path = tmp_path / "run.session"
    with create(path, ranks=1, foreign=ForeignMeta()):
        pass
    assert run(["replay", str(path), "--batch", "--ex", "golden"]) != 0
    assert "lockstep check run.session --model MODEL --save JUDGED.session" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "diagnose"])
def test_a_status_is_shown_before_the_libraries_are_imported(command: str) -> None:
    program = f"""
import sys
class Noticed:
    def find_spec(self, name, *rest):
        if name == "lockstep.workbench.library.judging":
            sys.stderr.write("JUDGING")
            raise SystemExit(0)
sys.meta_path.insert(0, Noticed())
sys.argv = ["lockstep", "{command}", "demo"]
from lockstep.workbench.cli.entry import main
main()
"""
    terminal, side = os.openpty()
    try:
        subprocess.run(
            [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=side
        )
        shown = os.read(terminal, 65536).decode()
    finally:
        os.close(side)
        os.close(terminal)
    before, found, _ = shown.partition("JUDGING")
    assert found
    assert "lockstep: loading the libraries…" in before
