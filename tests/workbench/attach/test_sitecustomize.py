"""The shim: it runs installers after the engine's own imports, beside another sitecustomize, and breaks nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.workbench.attach.launch import DOOR
from lockstep.workbench.attach.tap_file import INSIDE

INSTALLER = """
def nano_runner(module):
    print("installed on", module.__name__, module.VALUE, module.__spec__.loader.__class__.__name__)
    {more}
"""
#: The sitecustomize that was there before.
OTHER = """
import os, pathlib
(pathlib.Path(__file__).parent / f"other-{os.getpid()}").touch()
"""
#: A process that imports an engine, and another that it spawns.
PROGRAM = """
import multiprocessing, sys
def child():
    import nanovllm.engine.model_runner
if __name__ == "__main__":
    child()
    print("went on", flush=True)
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start(), process.join()
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A folder with an engine, a stand-in for its installer, and a sitecustomize."""
    package = tmp_path / "nanovllm" / "engine"
    package.mkdir(parents=True)
    (package / "model_runner.py").write_text("VALUE = 'loaded'\n")
    (tmp_path / "sitecustomize.py").write_text(OTHER)
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def run(engine: Path, more: str = "", **environment: str) -> tuple[list[str], str]:
    """What the program prints: lines of stdout, and stderr. The installer does `more`."""
    door, inside = (
        engine / "shim" / "door",
        engine / "shim" / "inside",
    )  # with a stand-in, which imports no torch
    for folder, original, names in (
        (door, DOOR, ["sitecustomize.py"]), (inside, INSIDE, ["__init__.py", "lockstep_report.py"]),
    ):  # fmt: skip
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text((original / name).read_text())
    (inside / "lockstep_nano.py").write_text(INSTALLER.format(more=more))
    path = os.pathsep.join([str(door), str(engine)])
    base = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_TAP")}
    done = subprocess.run(
        [sys.executable, "-u", str(engine / "program.py")],
        env={**base, "PYTHONPATH": path, **environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines(), done.stderr


INSTALLED = "installed on nanovllm.engine.model_runner loaded SourceFileLoader"


def test_installers_run_in_every_process(engine: Path) -> None:
    out, err = run(engine, LOCKSTEP_TAP=str(engine / "dump"))
    assert (out, err) == ([INSTALLED, "went on", INSTALLED], "")
    assert len(list(engine.glob("other-*"))) >= 2


@pytest.mark.parametrize("environment", [{}, {"LOCKSTEP_TAP": "dump", "LOCKSTEP_TAP_ENGINE": "vllm"}])
def test_nothing_is_installed_that_was_not_asked_for(engine: Path, environment: dict[str, str]) -> None:
    assert run(engine, **environment) == (["went on"], "")
    assert len(list(engine.glob("other-*"))) >= 2


def test_an_error_of_an_installer_is_reported_and_the_engine_goes_on(engine: Path) -> None:
    out, err = run(engine, more="raise KeyError('no such attribute')", LOCKSTEP_TAP=str(engine / "dump"))
    assert "went on" in out
    reported = "lockstep_nano.nano_runner on nanovllm.engine.model_runner: KeyError: 'no such attribute'"
    assert err.splitlines() == [f"lockstep attach: {reported} (the engine goes on)"] * 2  # once a process
    reports = [json.loads(file.read_text()) for file in (engine / "dump").glob("report-*.jsonl")]
    assert [(one["kind"], one["text"].splitlines()[0]) for one in reports] == [("failed", reported)] * 2
