"""Ranks that torchrun starts: they join, compute what local ranks do, and are lost no less visibly."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.engine.config import EngineConfig
from lockstep.engine.errors import RankError, RankTimeout
from lockstep.engine.ranks.client import Client
from lockstep.engine.ranks.joining import KEY_VARIABLE, RELAY_SECONDS
from lockstep.engine.ranks.messages import AddSequence, ResumeStep, RunStep, WatchTaps
from lockstep.engine.ranks.remote import SILENT_AFTER
from lockstep.engine.ranks.reports import StepReport
from lockstep.engine.taps.breaks import PauseSpec
from lockstep.engine.taps.names import model_taps
from tests.engine.harness import DEVICE, Engine, Pass, model_config
from tests.engine.ranks.test_lifecycle import O_PROJ, reach

ROOT = Path(__file__).parents[3]
SECRET = "5a1c0f9e" * 8
PROGRAM = "tests.engine.troubled_rank"
PROMPT = [3, 130, 17, 99]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the host listens; the key is set."""
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def torchrun(address: str, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """torchrun with two ranks that look for the host, of the program given or a troubled one; no process of it may be
    left."""
    program = getattr(request, "param", ["-m", PROGRAM])
    arguments = ["--nproc-per-node", "2", "--master-port", str(free_port()), *program, address]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    yield process
    try:
        process.communicate(timeout=30)
    finally:
        process.kill()


def connected(address: str, path: Path, **trouble: str) -> Client:
    """The host's side, with a model and a prompt."""
    config = EngineConfig(tp=2, threads=1, listen=address, timeout_seconds=30, device=DEVICE)
    client = Client(config, model_taps(model_config(path), 2), program=PROGRAM)
    client.load(path, trouble)
    client.call(AddSequence(0, PROMPT))
    return client


@pytest.mark.slow
def test_torchrun_computes_what_local_ranks_do(
    address: str,
    torchrun: subprocess.Popen[str],
    variant: Callable[[str], Path],
    engine_of: Callable[[int], Engine],
) -> None:
    """Bit by bit, and they stop where they are asked to; they leave in order when the host closes."""
    path = variant("qwen2-tied")
    local = engine_of(2)
    local.load(path)
    local.capture(statistics=True)
    expected = [one.checksums for one in local.generate([PROMPT], 3)]
    client = connected(address, path)
    try:
        client.call(WatchTaps(statistics=True))
        for sums in expected:
            found = Pass(client.call(RunStep()), client.specs).checksums
            assert (found == sums).all()
        client.interrupt()
        time.sleep(5 * RELAY_SECONDS)  # it travels beside the commands
        stopped = client.call(RunStep(pause=PauseSpec()), timeout=30)
        assert [report.pause.reason for report in stopped] == ["interrupt"] * 2
        client.clear_interrupt()
        time.sleep(5 * RELAY_SECONDS)
        assert all(isinstance(one, StepReport) for one in client.call(ResumeStep(PauseSpec())))
    finally:
        client.close(patience=10)
    output, _ = torchrun.communicate(timeout=30)
    assert torchrun.returncode == 0, output


LOCKSTEP = [sys.executable, "-P", "-m", "lockstep.workbench.cli"]


@pytest.mark.parametrize("torchrun", [["--no-python", *LOCKSTEP, "rank"]], indirect=True)
@pytest.mark.slow
def test_lockstep_rank_knows_the_catalogue(
    address: str, torchrun: subprocess.Popen[str], variant: Callable[[str], Path]
) -> None:
    config = EngineConfig(tp=2, threads=1, listen=address, timeout_seconds=60)
    with Client(config, program="lockstep.engine.faults.rank") as client:
        client.load(variant("qwen2-tied"), {"load_bias": "false"})
    output, _ = torchrun.communicate(timeout=60)
    assert torchrun.returncode == 0, output


@pytest.mark.slow
def test_lockstep_rank_without_torchrun_or_with_a_wrong_address_reports_it(address: str) -> None:
    for where, stated in ((address, "start this program with torchrun"), ("nowhere", "HOST:PORT")):
        done = subprocess.run([*LOCKSTEP, "rank", where], capture_output=True, text=True, timeout=120)
        assert done.returncode == 2, done.stderr
        assert stated in done.stderr


@pytest.mark.slow
def test_a_rank_of_torchrun_that_dies_is_named_and_the_others_end(
    address: str, torchrun: subprocess.Popen[str], variant: Callable[[str], Path]
) -> None:
    client = connected(address, variant("qwen2-tied"), trouble="sleep", rank="0")
    ranks = [psutil.Process(pid) for pid in client.pids]
    client.send(RunStep())
    reach(client, 0, O_PROJ)
    reach(client, 1, O_PROJ)
    os.kill(client.pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match=rf"rank 1 is lost: its connection from 127.0.0.1 broke.*at {O_PROJ}"):
        client.collect(RunStep(), 30)
    psutil.wait_procs(ranks, timeout=10)
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.slow
def test_a_rank_of_torchrun_that_hangs_is_reported_with_where_it_stands(
    address: str, torchrun: subprocess.Popen[str], variant: Callable[[str], Path]
) -> None:
    """All that its host has of it is that it was silent."""
    client = connected(address, variant("qwen2-tied"), trouble="sleep", rank="1")
    ranks = [psutil.Process(pid) for pid in client.pids]
    client.send(RunStep())
    reach(client, 1, O_PROJ)
    os.kill(client.pids[1], signal.SIGSTOP)
    with pytest.raises(RankTimeout) as error:
        client.collect(RunStep(), SILENT_AFTER + 1)
    stated = str(error.value)
    assert stated.startswith(
        f"rank 1 has not entered the all-reduce of {O_PROJ} that rank 0 waits in: nothing"
    )
    assert f"rank 1 at {O_PROJ}, step 0" in stated
    os.kill(client.pids[1], signal.SIGCONT)
    psutil.wait_procs(ranks, timeout=10)
    assert not any(rank.is_running() for rank in ranks), "a rank outlived its host"
