"""A model that no machine can hold: one line and exit 3 from every command that would run it, nothing started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.workbench.cli.main import run
from lockstep.workbench.demo import MODEL_DIR
from tests.workbench.models.hostile_tokenizers import KINDS


@pytest.mark.sampled(6)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", ["generate", "check", "run"])
@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize(
    "sizes",
    [{"num_hidden_layers": 2_000}, {"hidden_size": 2_000_000_000}],
    ids=lambda sizes: next(iter(sizes)),
)
def test_sizes_that_its_files_contradict_are_refused_before_anything_starts(
    command: str, sizes: dict[str, int], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(MODEL_DIR, tmp_path / "hostile")
    config = json.loads((path / "config.json").read_text()) | {"layer_types": None} | sizes
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115 - `run` reads commands from it
    before = set(psutil.Process().children())
    assert run([command, str(path), "--prompt", "hi"]) == 3
    assert set(psutil.Process().children()) <= before
    stated = capsys.readouterr().err.strip()
    assert stated.count("\n") == 0
    assert "do not fit the configuration" in stated
    assert "The configuration describes" in stated


@pytest.mark.sampled(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("command", ["generate", "check", "run", "diagnose"])
def test_a_tokenizer_that_panics_is_one_line_and_no_verdict(
    command: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(MODEL_DIR, tmp_path / "hostile")
    (path / "tokenizer.json").unlink()
    KINDS["a regular expression that gives up"](path)
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115 - `run` reads commands from it
    assert run([command, str(path), "--prompt", "a" * 100]) == 3
    stated = capsys.readouterr().err
    assert "the tokenizer failed: PanicException" in stated
    assert "--ids" in stated
    assert "Traceback" not in stated
    assert stated.strip().count("\n") == 0
