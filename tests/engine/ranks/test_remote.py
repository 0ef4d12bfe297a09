"""Ranks that torchrun starts: they join, compute what local ranks do, and are lost no less visibly."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from msgspec.msgpack import Decoder

from engine.config import EngineConfig
from engine.errors import ConfigError, RankError, RankTimeout
from engine.ranks import remote
from engine.ranks.client import Client
from engine.ranks.environment import rank_environment
from engine.ranks.joining import (
    KEY_VARIABLE,
    PAUSES,
    RELAY_SECONDS,
    Admission,
    Challenge,
    JoinRequest,
    PauseWish,
    Role,
    address_of,
    join,
    shared_key,
)
from engine.ranks.messages import AddSequence, ResumeStep, RunStep, WatchTaps
from engine.ranks.progress import ProgressBoard, Standing
from engine.ranks.remote import RemoteRank, accept_ranks
from engine.ranks.reports import StepReport
from engine.ranks.wire import Connection
from engine.taps.breaks import PauseSpec
from engine.taps.names import model_taps
from tests.engine.harness import Engine, Pass, model_config
from tests.engine.ranks.test_lifecycle import O_PROJ, reach

ROOT = Path(__file__).parents[3]
SECRET = "a secret of the tests"
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
    config = EngineConfig(tp=2, threads=1, listen=address, timeout_seconds=30)
    client = Client(config, model_taps(model_config(path), 2), program=PROGRAM)
    client.load(path, trouble)
    client.call(AddSequence(0, PROMPT))
    return client


def test_torchrun_computes_what_local_ranks_do(
    address: str,
    torchrun: subprocess.Popen[str],
    variant: Callable[[str], Path],
    engine_of: Callable[[int], Engine],
) -> None:
    """Bit by bit, and they stop where they are told to; they leave in order when the host closes."""
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


LOCKSTEP = [sys.executable, "-P", "-m", "workbench.cli"]


@pytest.mark.parametrize("torchrun", [["--no-python", *LOCKSTEP, "rank"]], indirect=True)
def test_lockstep_rank_knows_the_catalogue(
    address: str, torchrun: subprocess.Popen[str], variant: Callable[[str], Path]
) -> None:
    config = EngineConfig(tp=2, threads=1, listen=address, timeout_seconds=60)
    with Client(config, program="engine.faults.rank") as client:
        client.load(variant("qwen2-tied"), {"load_bias": "false"})
    output, _ = torchrun.communicate(timeout=60)
    assert torchrun.returncode == 0, output


def test_lockstep_rank_without_torchrun_or_with_a_wrong_address_says_so(address: str) -> None:
    for where, said in ((address, "start this program with torchrun"), ("nowhere", "HOST:PORT")):
        done = subprocess.run([*LOCKSTEP, "rank", where], capture_output=True, text=True, timeout=120)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr


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


def test_a_rank_of_torchrun_that_hangs_is_reported_with_where_it_stands(
    address: str, torchrun: subprocess.Popen[str], variant: Callable[[str], Path]
) -> None:
    client = connected(address, variant("qwen2-tied"), trouble="sleep", rank="1")
    ranks = [psutil.Process(pid) for pid in client.pids]
    client.send(RunStep())
    with pytest.raises(RankTimeout, match=f"rank 1 at {O_PROJ}, step 0"):
        client.collect(RunStep(), 1.0)
    psutil.wait_procs(ranks, timeout=10)
    assert not any(rank.is_running() for rank in ranks), "a rank outlived its host"


class Host:
    """`accept_ranks` in a thread, for ranks that the test plays itself."""

    def __init__(self, address: str, tp: int) -> None:
        self.board, self.ranks = ProgressBoard.create(tp), list[RemoteRank]()
        config = EngineConfig(tp=tp, listen=address)
        self._thread = threading.Thread(
            target=lambda: self.ranks.extend(accept_ranks(config, self.board, "p"))
        )
        self._thread.start()

    def joined(self) -> list[RemoteRank]:
        self._thread.join(30)
        return self.ranks

    def close(self) -> None:
        for rank in self.joined():
            rank.end(0)
        self.board.close()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_strangers_are_turned_away_and_the_ranks_still_join(address: str) -> None:
    host, where, key = Host(address, 1), address_of(address), shared_key()
    with pytest.raises(ConfigError, match="the key is not the host's"):
        join(where, b"somebody else's secret", 0, 1, Role.COMMANDS)
    with pytest.raises(ConfigError, match="started 2 ranks, but the host was given --tp 1"):
        join(where, key, 1, 2, Role.COMMANDS)
    with pytest.raises(ConfigError, match="no rank 7"):
        join(where, key, 7, 1, Role.COMMANDS)
    for junk in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        b"\x01\x00\x00\x00\x80",
    ):
        with socket.create_connection(where) as stranger, suppress(ConnectionResetError):
            stranger.sendall(junk)
            while stranger.recv(4096):  # the challenge, then the door
                pass
    commands, told = join(where, key, 0, 1, Role.COMMANDS)
    assert (told.device, told.timeout) == ("cpu", 60.0)
    with pytest.raises(ConfigError, match="rank 0 has joined already"):
        join(where, key, 0, 1, Role.COMMANDS)
    line, _ = join(where, key, 0, 1, Role.BOARD)
    assert len(host.joined()) == 1
    host.close()
    for sock in (commands, line):
        assert not sock.recv(1)
        sock.close()


def test_a_host_without_the_key_is_refused_by_the_rank(address: str) -> None:
    """It may listen where the host should: no rank serves it."""
    impostor = socket.create_server(address_of(address))

    def listen() -> None:
        sock, _ = impostor.accept()
        connection = Connection(sock, Decoder(JoinRequest))
        connection.send(Challenge(b"x" * 32))
        request = connection.receive()
        connection.send(Admission(request.proof, "cpu", 60.0, 1))  # all that it has heard
        sock.close()

    listening = threading.Thread(target=listen)
    listening.start()
    with pytest.raises(ConfigError, match="does not hold the key"):
        join(address_of(address), shared_key(), 0, 1, Role.COMMANDS)
    listening.join(30)
    impostor.close()


def test_the_board_carries_places_and_the_wish_to_pause(address: str) -> None:
    host, where = Host(address, 1), address_of(address)
    commands, _ = join(where, shared_key(), 0, 1, Role.COMMANDS)
    board, _ = join(where, shared_key(), 0, 1, Role.BOARD)
    host.joined()
    line = Connection(board, PAUSES)
    line.send(Standing(3, 17, 99))
    eventually(lambda: host.board.read(0) == Standing(3, 17, 99))
    for wanted in (True, False):
        host.board.ask_to_pause(wanted)
        assert line.receive() == PauseWish(wanted)
    host.close()
    commands.close()
    line.close()


def test_a_rank_that_comes_without_key_host_or_torchrun_says_so(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no host listens"):
        join(address_of(address), shared_key(), 0, 1, Role.COMMANDS, patience=0)
    with pytest.raises(ConfigError, match="start this program with torchrun"):
        rank_environment(address)
    with pytest.raises(ConfigError, match="HOST:PORT"):
        address_of("nowhere")
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ConfigError, match="16 or more"):
        shared_key()


def test_the_host_names_the_ranks_that_did_not_come(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "JOIN_SECONDS", 0.1)
    with pytest.raises(RankTimeout, match=f"rank 0, 1 did not come.*torchrun … -m prog {address}"):
        accept_ranks(EngineConfig(tp=2, listen=address), ProgressBoard.create(2), "-m prog")
    with socket.create_server(address_of(address)), pytest.raises(ConfigError, match="cannot listen"):
        accept_ranks(EngineConfig(tp=1, listen=address), ProgressBoard.create(1), "prog")
