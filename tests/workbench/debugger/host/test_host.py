"""The host process and its client: requests, events, interrupts, lost ranks, kills, full disks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from lockstep.engine.scratch import ScratchFolder
from lockstep.sessions import Session
from lockstep.sessions.verify import verify
from lockstep.workbench.debugger.events import RankLostEvent, StepEvent, StoppedEvent
from lockstep.workbench.debugger.host import client as client_module
from lockstep.workbench.debugger.host.client import HostClient
from lockstep.workbench.debugger.host.messages import HostEvent, ReadyEvent
from lockstep.workbench.debugger.host.pending import HostError, HostLost
from tests.checkpoints import tiny_checkpoint
from tests.running import still_running
from tests.workbench.debugger.host.test_replay import RECORDED

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = "lockstep.workbench.cli.host"

E = TypeVar("E", bound=HostEvent)


class Heard:
    """The events of a host, in order."""

    def __init__(self) -> None:
        self.events: list[HostEvent] = []
        self.changed = threading.Condition()

    def __call__(self, event: HostEvent) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def wait_for_step(self, step: int, timeout: float = 60) -> None:
        """Until a step from `step` on was reported."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.last_step() >= step, timeout), step

    def last_step(self) -> int:
        """The newest step that was reported, 0 for none."""
        return max((event.step for event in self.events if isinstance(event, StepEvent)), default=0)

    def wait_for(self, kind: type[E], timeout: float = 60) -> E:
        """The first event of that kind."""
        with self.changed:
            assert self.changed.wait_for(lambda: any(isinstance(e, kind) for e in self.events), timeout), kind
            return next(event for event in self.events if isinstance(event, kind))


def launch(checkpoint: Path, session: Path, heard: Heard, *words: str, tp: int = 1) -> HostClient:
    arguments = [
        str(checkpoint),
        "--tp",
        str(tp),
        "--ids",
        "3,14,15,92,65",
        "--session",
        str(session),
        *words,
    ]
    client = HostClient.start(arguments, heard, program=PROGRAM)
    client.ready.result(90)
    return client


@pytest.fixture(scope="module")
def host(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HostClient, Heard]]:
    heard = Heard()
    client = launch(checkpoint, tmp_path_factory.mktemp("host") / "a.session", heard, tp=2)
    yield client, heard
    client.close()


def test_requests_answers_events(host: tuple[HostClient, Heard]) -> None:
    client, heard = host
    answer = client.command("next 2").result(30)
    assert answer.result["kind"] == "stopped"
    assert answer.state.step == 1
    assert heard.wait_for(StoppedEvent).reason == "step"
    assert client.call("goto", step=0).result(30).state.step == client.state().result(30).state.step == 0
    assert client.tensor("layers.0.attn.q_proj", rank=1).result(30).tensor.array.shape == (5, 32)
    assert len(client.weight("model.norm.weight").result(30).tensors) == 2
    names = {one.name for one in client.registry().result(30).commands}
    assert {"next", "toggle", "reverse-continue", "export"} <= names
    with Session.open(Path(heard.wait_for(ReadyEvent).session)) as session:
        assert session.steps() == range(2)


def test_mistakes_come_back_with_their_place(host: tuple[HostClient, Heard]) -> None:
    client, _ = host
    with pytest.raises(HostError, match="expected a value") as info:
        client.command("break logits if absmax >").result(30)
    assert (info.value.exit_code, info.value.caret) == (2, 8)
    with pytest.raises(HostError, match="no command"):
        client.command("brk").result(30)
    with pytest.raises(HostError, match="must be a whole number"):
        client.call("next", count="many").result(30)


def test_an_interrupt_overtakes(host: tuple[HostClient, Heard]) -> None:
    client, _ = host
    client.command("goto 1").result(30)
    running = client.command("until 100000")
    client.interrupt().result(30)
    stop = running.result(60).result
    assert stop["reason"] in ("pause", "end")
    script = client.command("export script").result(30).text
    assert "goto" in script


def test_an_interrupt_while_nothing_runs_stops_nothing(host: tuple[HostClient, Heard]) -> None:
    client, _ = host
    client.command("goto 0").result(30)
    client.interrupt().result(30)
    assert client.command("next").result(30).result["reason"] == "step"


def test_the_socket_is_the_owners_alone(checkpoint: Path, tmp_path: Path) -> None:
    open_place = ScratchFolder.make("open", tmp_path).path
    open_place.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, "--socket", str(open_place / "s"), str(checkpoint)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "must belong to you alone" in done.stderr


def test_a_temporary_directory_too_deep_for_a_socket_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    client = HostClient.start([str(tmp_path / "nothing")], program=PROGRAM)
    try:
        with pytest.raises(HostError, match="no such file"):
            client.ready.result(60)
    finally:
        client.close()


def test_what_cannot_start_reports_why(tmp_path: Path) -> None:
    client = HostClient.start([str(tmp_path / "nothing")], program=PROGRAM)
    with pytest.raises(HostError, match="no such file") as info:
        client.ready.result(60)
    assert info.value.exit_code == 3
    client.close()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_processes")
def test_a_lost_rank_is_reported_and_restart_works(checkpoint: Path, tmp_path: Path) -> None:
    heard = Heard()
    client = launch(checkpoint, tmp_path / "lost.session", heard, tp=2)
    try:
        client.command("next 3").result(60)
        os.kill(heard.wait_for(ReadyEvent).rank_pids[1], signal.SIGKILL)
        assert "rank 1 is lost" in heard.wait_for(RankLostEvent).message, "while nothing runs"
        with pytest.raises(HostError, match="rank 1 is lost") as info:
            client.command("next").result(60)
        assert info.value.exit_code == 5
        assert client.command("reverse-next").result(30).state.step == 1  # the record is still there
        with pytest.raises(HostError, match="`restart` starts it again"):
            client.command("next 5").result(30)
        client.command("restart").result(90)
        state = client.command("next 5").result(60).state
        assert (state.step, state.live) == (4, True)
        client.command("catch error").result(30)
        ranks = [
            child.pid for child in psutil.Process(client.process.pid).children(recursive=True)
            if "lockstep.engine.faults.rank" in child.cmdline()
        ]  # fmt: skip
        os.kill(ranks[0], signal.SIGKILL)
        stop = client.command("next").result(60).result
        assert (stop["reason"], stop["hitBreakpointIds"]) == ("exception", [1])
        assert "is lost" in stop["description"]
        client.command("restart").result(90)
        assert client.command("next 6").result(60).state.step == 5
        script = client.command("export script").result(30).text.splitlines()[1:]
        assert script[script.index("catch error") :] == ["catch error", "goto 4", "restart", "next 6"]
    finally:
        client.close()
    assert verify(tmp_path / "lost.session") == []


@pytest.mark.slow
def test_a_stopped_host_is_reported_until_it_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay's, which has no ranks."""
    monkeypatch.setattr(client_module, "_SILENT_AFTER", 2.0)
    heard = Heard()
    client = HostClient.start(["--replay", str(RECORDED / "load_bias-false.session")], heard, program=PROGRAM)
    try:
        pid = client.ready.result(90).pid
        os.kill(pid, signal.SIGSTOP)
        answer = client.state()
        while not client.unresponsive:
            time.sleep(0.05)
        assert f"its process (pid {pid}) is stopped (state T" in client.unresponsive
        assert not answer.done()
        os.kill(pid, signal.SIGCONT)
        assert answer.result(30).state.step >= -1
        while client.unresponsive:
            time.sleep(0.05)
        assert {type(event) for event in heard.events} == {ReadyEvent}, "heartbeats are the client's own"
        os.kill(pid, signal.SIGSTOP)
        while not client.unresponsive:
            time.sleep(0.05)
    finally:
        client.close()
    assert client.process.returncode == -signal.SIGKILL, "one that is stopped is not asked to end"


@pytest.mark.slow
def test_a_host_dies_with_its_client_and_its_ranks_with_it(checkpoint: Path, tmp_path: Path) -> None:
    session = tmp_path / "orphan.session"
    program = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from lockstep.workbench.debugger.host.client import HostClient
words = [{str(checkpoint)!r}, "--tp", "2", "--ids", "1,2,3", "--session", {str(session)!r}]
client = HostClient.start(words, program={PROGRAM!r})
ready = client.ready.result(90)
print(ready.pid, *ready.rank_pids, flush=True)
client.command("until 100000")
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        pids = [int(word) for word in client.stdout.readline().split()]
        assert len(pids) == 3
        client.kill()
    _, alive = psutil.wait_procs(still_running(pids), timeout=20)
    assert alive == []
    assert verify(session) == []


def kill_in_mid_step(checkpoint: Path, session: Path, chance: random.Random) -> None:
    """Start, run, kill -9 somewhere in one of the first steps; the session must open and be whole."""
    heard = Heard()
    client = launch(checkpoint, session, heard, tp=chance.choice((1, 2)))
    pids = heard.wait_for(ReadyEvent).rank_pids
    client.command("next 2").result(60)
    running = client.command("until 100000")  # ends by itself where the context is full, long after the kill
    heard.wait_for_step(chance.randint(2, 25))
    time.sleep(chance.uniform(0, 0.05))
    client.process.kill()
    with pytest.raises(HostLost):
        running.result(30)
    _, alive = psutil.wait_procs(still_running(pids), timeout=20)
    assert alive == []
    client.close()
    assert verify(session) == []
    with Session.open(session) as opened:
        steps = opened.steps()
        assert steps.start == 0
        assert len(steps) >= 2
        reported = [opened.step(step).sequences[0] for step in steps]
        assert [list(one.ids) for one in reported[1:]] == [[one.emitted] for one in reported[:-1]]
        assert steps[-1] >= heard.last_step(), "a step that was reported had been committed"


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose context no run fills before it is killed."""
    return tiny_checkpoint(tmp_path_factory.mktemp("roomy"), "qwen2", max_position_embeddings=4096)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])  # two ranks, and one
def test_kill_in_mid_step(roomy: Path, tmp_path: Path, seed: int) -> None:
    kill_in_mid_step(roomy, tmp_path / "killed.session", random.Random(seed))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kill_in_mid_step_fifty_times(roomy: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    for round in range(50):
        kill_in_mid_step(roomy, tmp_path / f"{round}.session", chance)
