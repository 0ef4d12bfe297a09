"""Kernels that numba compiles: what it obeys, and how work is shared out over threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.engine import compiled

#: A file of settings that comes into the working directory once the kernels have been imported.
_LATER = """
import pathlib
from lockstep.engine.compiled import kernels
kernels("lockstep.engine.taps.cpu_kernels")
import numba
pathlib.Path(".numba_config.yaml").write_text("disable_jit: 1\\n")
numba.core.config.reload_config()
print(numba.core.config.DISABLE_JIT)
"""


def test_settings_in_the_working_directory_are_not_obeyed(tmp_path: Path, monkeypatch) -> None:
    """They name modules that are imported (`cache_locator_classes`) and a folder that is unpickled from."""
    (tmp_path / ".numba_config.yaml").write_text("cache_locator_classes: planted.Locator\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    with pytest.raises(RuntimeError, match=r"obey \.numba_config\.yaml in the working directory"):
        compiled.kernels.__wrapped__("lockstep.engine.taps.cpu_kernels")
    assert "numba" not in sys.modules


@pytest.mark.slow
def test_nor_those_that_come_later(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-c", _LATER], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "0\n"), run.stderr


@pytest.mark.parametrize(("count", "least", "found"), [(0, 1, 0), (1, 1, 1), (7, 1, 3), (7, 4, 2), (7, 9, 1)])
def test_runs_cover_all_once(monkeypatch, count: int, least: int, found: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    runs = compiled.runs(count, least)
    assert len(runs) == found
    assert [i for run in runs for i in range(count)[run]] == list(range(count))


def test_what_fails_on_a_thread_is_raised() -> None:
    def work(number: int) -> None:
        if number == 2:
            raise ValueError("the third")

    with pytest.raises(ValueError, match="the third"):
        compiled.on_threads(work, 3)
