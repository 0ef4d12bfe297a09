"""`lockstep attach`: a command's run becomes a session, however the command ends; its own streams are left alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.sessions import Session
from lockstep.workbench.cli.main import run

#: An engine that records itself, as a tapped one is recorded: a prompt of three tokens and steps of decode.
ENGINE = """
import os, sys
from pathlib import Path
import torch
from lockstep.workbench.attach.inside.lockstep_recorder import open_tape
rank, ranks, ending = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
print("text of the engine")
tape = open_tape("mine", rank, ranks, mode="eager")
for at, ids in enumerate([[5, 6, 7], [8], [9]]):
    tape.step(ids, 0 if at == 0 else at + 2, "a")
    tape.tap("embed", torch.tensor(ids).float()[:, None].repeat(1, 8), "replicate")
    tape.tap("layers.0.attn_norm", torch.ones(len(ids), 4), "replicate")
    tape.tap("layers.1.attn_norm", torch.ones(len(ids), 4), "replicate")
    tape.tap("logits", torch.eye(16)[ids[-1:]], "replicate")
    tape.end()
    if at == 1 and ending == "dies":
        os.kill(os.getpid(), 9)
sys.exit({"fails": 7, "fails1": 1}.get(ending, 0))
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command that is an engine; what follows is its rank, the number of ranks, and how it ends."""
    program = tmp_path_factory.mktemp("engine") / "engine.py"
    program.write_text(ENGINE.replace("lockstep.workbench.attach.inside", "_lockstep_attached"))
    return [sys.executable, str(program)]


def attached(capfd: Any, target: Path, *words: str, code: int = 0) -> tuple[str, str]:
    assert run(["attach", "-o", str(target), *words]) == code
    reported = capfd.readouterr()
    return reported.out, reported.err


def ids(session: Session) -> list[list[int]]:
    return [list(step.sequences[0].ids) for step in map(session.step, session.steps())]


def test_the_run_of_a_command_is_a_session(engine: list[str], tmp_path: Path, capfd: Any) -> None:
    target = tmp_path / "run.session"
    out, err = attached(capfd, target, "--", *engine, "0", "1", "ends")
    assert out == "text of the engine\n"
    assert "lockstep: 5 rows · 1 of 19 taps × 2 layers · 1/1 rank · recorded eager\n" in err
    assert f"lockstep: recorded in {target}\n" in err
    with Session.open(target) as session:
        assert ids(session) == [[5, 6, 7], [8], [9]]
        assert session.meta.source == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["run.session"]  # nothing of the dump


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "code", "printed", "rows"),
    [
        ("fails1", 6, "the command ended with exit code 1", [[5, 6, 7], [8], [9]]),  # 1 is a verdict
        ("fails", 7, "the command ended with exit code 7", [[5, 6, 7], [8], [9]]),
        ("dies", 137, "the command was ended by SIGKILL", [[5, 6, 7], [8]]),
    ],
)
def test_a_command_that_fails_leaves_what_it_did(
    ending: str, code: int, printed: str, rows: list[list[int]], engine: list[str], tmp_path: Path, capfd: Any
) -> None:
    target = tmp_path / "run.session"
    _, err = attached(capfd, target, "--", *engine, "0", "1", ending, code=code)
    assert f"lockstep: {printed}; what it did until then is recorded\n" in err
    with Session.open(target) as session:
        assert ids(session) == rows
        assert printed in session.meta.notes


@pytest.mark.slow
def test_reports_of_a_hostile_engine_neither_hang_nor_fail_us(
    engine: list[str], tmp_path: Path, capfd: Any
) -> None:
    script = 'mkdir -p $LOCKSTEP_TAP; cd $LOCKSTEP_TAP; mkfifo report-1.jsonl; ln -s /dev/zero report-2.jsonl; "$@"'
    attached(capfd, tmp_path / "run.session", "--", "sh", "-c", script, "sh", *engine, "0", "1", "ends")
    with Session.open(tmp_path / "run.session") as session:
        assert ids(session) == [[5, 6, 7], [8], [9]]
        assert "not recorded: report-2.jsonl: is a link: copy what it points to there" in session.meta.notes


@pytest.mark.slow
def test_taps_steps_and_the_dump_are_chosen(engine: list[str], tmp_path: Path, capfd: Any) -> None:
    target, kept = tmp_path / "run.session", tmp_path / "dump"
    asked = ["--only", "layers.1.*", "--steps", "1", "--keep-dump", str(kept), "--json"]
    out, _ = attached(capfd, target, *asked, "--", *engine, "0", "1", "ends")
    text, _, report = out.partition("\n")
    assert text == "text of the engine"
    reported = json.loads(report)
    assert (reported["session"], reported["code"], reported["coverage"]["rows"]) == (str(target), 0, 4)
    with Session.open(target) as session:
        assert [tap.name for tap in session.taps] == ["embed", "layers.1.attn_norm", "logits"]
    assert (kept / "rank0" / "passes.jsonl").is_file()
    assert run(["attach", "--keep-dump", str(kept), "--", "true"]) == 2
    assert "name a new folder" in capfd.readouterr().err


@pytest.mark.slow
def test_a_rank_that_left_nothing_is_reported(engine: list[str], tmp_path: Path, capfd: Any) -> None:
    _, err = attached(capfd, tmp_path / "run.session", "--", *engine, "1", "2", "ends")
    assert "· 1/2 ranks ·" in err


@pytest.mark.parametrize(
    ("words", "code", "printed"),
    [
        (["--", "true"], 3, "no rank wrote a pass; it imported no vLLM"),
        (["--engine", "tensorrt", "--", "true"], 2, "engine is one of auto, vllm, sglang, nano, torch"),
        (["--capture", "some", "--", "true"], 2, "capture is full or stats, not 'some'"),
        (["--", "/no/such/program"], 3, "cannot start /no/such/program"),
        ([], 2, "Missing argument"),
    ],
)
def test_what_cannot_be_recorded(
    words: list[str], code: int, printed: str, tmp_path: Path, capfd: Any
) -> None:
    _, err = attached(capfd, tmp_path / "run.session", *words, code=code)
    assert printed in err
    assert not list(tmp_path.iterdir())
