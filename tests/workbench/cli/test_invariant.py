"""`lockstep invariant` as a user runs it: what it prints, its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lockstep.workbench.cli.main import run
from lockstep.workbench.exit_codes import Exit
from tests.checkpoints import tiny_checkpoint

PROGRAM = Path(__file__).parents[1] / "attach" / "transformers_program.py"


def test_a_right_model_rounds_at_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_checkpoint(tmp_path, "qwen2"))
    words = ["invariant", model, "--axis", "order,ep", "--ids", "3,17,99,4", "--steps", "1"]
    assert run([*words, "--json"]) == Exit.OK
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"] in ("equal", "rounding")
    order, ep = printed["axes"]
    assert (order["axis"], order["rows"], order["bugs"]) == ("order", 4 + 8 + 1 + 3, [])
    assert (ep["verdict"], ep["why"]) == ("not tried", "qwen2 has no experts")


@pytest.mark.slow
def test_a_state_that_is_left_behind_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_checkpoint(tmp_path, "qwen3_next"))
    words = ["invariant", model, "--axis", "batch", "--ids", "3,17,99,4", "--steps", "1"]
    assert run([*words, "--fault", "state_before=left"]) == Exit.DIVERGED
    printed = capsys.readouterr().out
    assert "wrong: layers.0.attn.state does not give what its inputs give" in printed
    assert "verdict  a bug along batch, in 1 of 1 variant" in printed


@pytest.mark.slow
def test_a_command_of_which_nothing_can_be_asked_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_checkpoint(tmp_path, "qwen2"))
    words = ["invariant", "--axis", "batch,order", "--", sys.executable, str(PROGRAM), model, "1,2,3"]
    assert run(words) == Exit.INCONCLUSIVE
    printed = capsys.readouterr().out
    assert "cannot be asked for a variant of it: it is the command's own" in printed
    assert "verdict  no variant could be tried" in printed


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["demo", "--axis", "speed"], "axis is all, or some of batch, order"),
        (["demo", "--axis", ","], "axis is all, or some of"),
        (["demo", "--ids", "1", "--ids", "2"], "the relations are tried on one prompt"),
        (["demo", "--axis", "tp", "--junit", "a.xml"], "--junit is of a model's relations"),
        (["--variant", "--one", "--", "serve", "me"], "--variant is AXIS=WORDS"),
        (["--variant", "speed=--fast", "--", "serve", "me"], "axis is all, or some of batch, order"),
    ],
)
def test_what_cannot_be_asked(words: list[str], reported: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["invariant", *words]) == Exit.USAGE
    assert reported in capsys.readouterr().err
