"""`lockstep tap`: one file, complete in itself, where it was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.workbench.attach.inside import lockstep_tap
from lockstep.workbench.attach.tap_file import tap_file
from lockstep.workbench.cli.main import run
from lockstep.workbench.foreign.readers.lockstep import LockstepDump

ALONE = """
import sys
sys.modules["numpy"] = None  # an environment without it
sys.path.insert(0, sys.argv[1])
import torch
from torch import nn
import lockstep_tap
from lockstep_tap import FUSED, TRANSFORMERS, Tape, attach, follow

class Engine(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(9, 4), nn.Linear(4, 9)
    def forward(self, input_ids, positions):
        return self.lm_head(self.embed_tokens(input_ids))

engine, tape = Engine(), Tape(sys.argv[2])
attach(engine, tape)
follow(engine, tape)
engine(torch.tensor([1, 2]), positions=torch.tensor([0, 1]))
"""


@pytest.mark.slow
def test_the_written_file_works_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tap", "--write", str(tmp_path)]) == 0
    stated = capsys.readouterr().out.splitlines()
    assert stated[0] == f"{tmp_path / 'lockstep_tap.py'}: version {lockstep_tap.__version__}"
    assert "Tape(" in stated[1]
    assert "tape.tap(" in stated[2]
    assert "lockstep import lockstep dump" in stated[3]
    assert len(stated) == 4
    words = [sys.executable, "-I", "-c", ALONE, str(tmp_path), str(tmp_path / "dump")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (one,) = LockstepDump.open(tmp_path / "dump").passes(0)
    assert [x.tap for x in one.tensors] == ["embed", "logits"]


def test_a_file_that_is_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tap_of_mine.py"
    path.write_text("mine")
    assert run(["tap", "--write", str(path)]) == 2
    assert "is there already: --force replaces it" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert run(["tap", "--write", str(path), "--force"]) == 0
    assert path.read_text() == tap_file()
    (tmp_path / "lockstep_tap.py").mkdir()
    assert run(["tap", "--write", str(tmp_path), "--force"]) == 2
    assert run(["tap", "--write", str(tmp_path / "none" / "x.py")]) == 2
    assert "is no folder: make it first" in capsys.readouterr().err


def test_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tap"]) == 0
    stated = capsys.readouterr().out
    assert f"lockstep_tap.py {lockstep_tap.__version__} " in stated
    assert f"(format {lockstep_tap.FORMAT})" in stated
    assert "--write PATH" in stated
    assert str(Path(lockstep_tap.__file__).parent) in stated
    assert run(["tap", "--json"]) == 0
    reported: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert reported == {
        "file": lockstep_tap.__file__,
        "version": lockstep_tap.__version__,
        "format": 1,
        "written": None,
    }
