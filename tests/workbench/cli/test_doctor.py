"""`lockstep doctor`: findings in one line each, an exit code, and advice where something is bad."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.workbench.cli import doctor, health
from lockstep.workbench.cli.health import Finding
from lockstep.workbench.cli.main import run


@pytest.mark.slow
def test_this_machine(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    model.touch()
    monkeypatch.setattr(health, "MODEL_DIR", tmp_path)
    assert run(["doctor", "--json"]) == 0
    reported = {one["what"]: one for one in json.loads(capsys.readouterr().out)}
    assert sys.version.split()[0] in reported["python"]["found"]
    assert reported["torch"]["level"] == "ok"
    assert reported["ranks"]["found"].startswith("two met over gloo")
    assert {"GPUs", "collectives", "memory", "data", "cache", "temporary", "terminal"} <= reported.keys()


def test_bad_findings_fail_with_advice(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [Finding("python", "ok", "3.12"), Finding("torch", "bad", "not \x1b[2Jthere", "install it")]
    monkeypatch.setattr(doctor, "examine", lambda: iter(findings))
    assert run(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("BAD")
    assert "-> install it" in lines[1]
    assert "\x1b" not in lines[1]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = health._directory("data", tmp_path / "file" / "below", "LOCKSTEP_DATA_DIR")
    assert finding.level == "bad"
    assert "LOCKSTEP_DATA_DIR" in finding.advice


def test_a_torch_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_PROBE", "raise ImportError('libcudart.so.13 is missing')")
    found = health._probe_torch()
    assert isinstance(found, Finding)
    assert found.level == "bad"
    assert "libcudart.so.13" in found.found


def test_missing_and_outdated_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        health, "requires", lambda name: ["numpy>=99", "no-such-package-here", "rich; extra == 'x'"]
    )
    monkeypatch.setattr(health.extras, "EXTRAS", {})
    found = list(health._packages())
    assert [finding.level for finding in found] == ["bad", "bad", "ok"]
    assert "is not >=99" in found[0].found
    assert found[1].advice == "pip install 'no-such-package-here'"
    assert found[2].found.startswith("0 of 2")


def test_a_search_path_that_names_the_working_directory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert health._search_paths().level == "ok"
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:")
    found = health._search_paths()
    assert (found.level, found.found.startswith("PYTHONPATH: ")) == ("note", True)
