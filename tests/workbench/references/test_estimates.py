"""The estimate of a golden recorder's memory against what one takes, and what is refused by it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from lockstep.engine.config import EngineConfig
from lockstep.engine.errors import RequestError
from lockstep.engine.peaks import peak_of
from lockstep.engine.run.memory import check_loadable
from lockstep.workbench.references.estimates import golden_bytes
from lockstep.workbench.references.golden import record_golden
from lockstep.workbench.references.recorder_process import run_recorder
from lockstep.workbench.references.request import (
    GoldenRequest,
    GoldenSequence,
    RecordingJob,
    ReferenceFailure,
)
from tests.checkpoints import tiny_checkpoint
from tests.running import children_with


@pytest.mark.slow
def test_a_recorder_takes_what_is_estimated(tmp_path: Path) -> None:
    """Of a model of which the weights are most: 34 million in float64."""
    path = tiny_checkpoint(tmp_path, "llama", hidden_size=512, intermediate_size=4096, num_hidden_layers=5)
    request = GoldenRequest(str(path), (GoldenSequence(tuple(range(3, 67))),), 0, "float64")
    jobs = tmp_path / "jobs.json"
    jobs.write_bytes(msgspec.json.encode([RecordingJob(request, "", str(tmp_path / "a.session"))]))
    command = [sys.executable, "-m", "lockstep.workbench.references.record", str(jobs)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, peak_of(process.pid))
            time.sleep(0.01)
    assert process.returncode == 0
    expected = sum(golden_bytes(check_loadable(path, EngineConfig()), request, None).values())
    assert peak / 1.3 <= expected <= peak * 1.3


def test_a_reference_that_would_not_fit_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()._replace(free=0)
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=300 << 20))
    with pytest.raises(
        RequestError, match="a reference by transformers over 3 tokens in float64 takes about"
    ):
        record_golden(path, [GoldenSequence((3, 4, 5))], 1, "float64", threads=1)


@pytest.mark.usefixtures("fresh_processes")
def test_a_recorder_that_the_kernel_kills_is_reported_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lockstep.engine.machine._COUNTERS", tmp_path / "none"
    )  # a kernel that does not count
    request = GoldenRequest(str(tiny_checkpoint(tmp_path, "llama")), (GoldenSequence((3,)),), 0)

    def kill() -> None:
        for child in children_with("jobs.json"):
            child.kill()

    with pytest.raises(
        ReferenceFailure, match=r"what the kernel does when memory runs out: .* --chunk"
    ) as failure:
        run_recorder([request], "", tmp_path, None, None, kill)
    assert failure.value.exit_code == 5
