"""A host process by itself, with a client made of a socket: whatever the client does, the host ends with it and with
its session whole, and its ranks end with the host."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import pack

import psutil
import pytest
from msgspec.msgpack import Decoder, encode

from lockstep.engine.lifeline import Lifeline
from lockstep.engine.ranks.wire import Connection
from lockstep.engine.scratch import ScratchFolder
from lockstep.sessions import Session
from lockstep.sessions.verify import verify
from lockstep.workbench.debugger.core import registry
from lockstep.workbench.debugger.events import StepEvent
from lockstep.workbench.debugger.host.messages import (
    AnswerFrame,
    CallRequest,
    ErrorAnswer,
    HeartbeatEvent,
    HostFrame,
    InterruptRequest,
    LineRequest,
    ReadyEvent,
    Request,
    RequestFrame,
    StateRequest,
    TensorRequest,
    WeightRequest,
)
from tests.checkpoints import tiny_checkpoint
from tests.running import children_with
from tests.workbench.debugger.host.test_replay import RECORDED

ROOT = Path(__file__).resolve().parents[4]
#: Seconds after which a host hangs.
_PATIENCE = 60.0
_REPLAY = ["--replay", str(RECORDED / "load_bias-false.session")]


class HostProcess:
    """A host and what it leaves. `directory` holds its socket and its temporary files."""

    def __init__(self, *words: str) -> None:
        self.folder = ScratchFolder.make("host", Path("/tmp"))  # a socket's path is short
        self.directory, self.lifeline = self.folder.path, Lifeline()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lockstep.workbench.cli.host", "--socket", str(self.directory / "socket"),
             "--lifeline", str(self.lifeline.fd), *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True, pass_fds=(self.lifeline.fd,),
            cwd=self.directory,  # where `record FILE` writes
        )  # fmt: skip
        self.lifeline.handed_over()
        self.ranks: list[psutil.Process] = []

    def connect(self) -> Connection[HostFrame]:
        """A client of it."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                client.connect(str(self.directory / "socket"))
            except (FileNotFoundError, ConnectionRefusedError):
                client.close()
                assert self.process.poll() is None, self.printed()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            else:
                client.settimeout(_PATIENCE)
                return Connection(client, Decoder(HostFrame))

    def ready(self) -> Connection[HostFrame]:
        """A client of it, once the debugger is there."""
        connection = self.connect()
        while not isinstance(frame := connection.receive(), ReadyEvent):
            assert isinstance(frame, HeartbeatEvent), frame
        self.ranks = [psutil.Process(pid) for pid in frame.rank_pids]
        return connection

    def ended(self) -> int:
        """Wait until the host, its ranks and its temporary files are gone; the exit code."""
        code = self.process.wait(_PATIENCE)
        _, alive = psutil.wait_procs(self.ranks, timeout=20)
        assert alive == []
        self.folder.close()
        assert not self.directory.exists()
        return code

    def printed(self) -> str:
        """Its stderr, once it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def close(self) -> None:
        """Leave nothing of it."""
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.lifeline.close()
        self.folder.close()


@pytest.fixture
def hosts() -> Iterator[Callable[..., HostProcess]]:
    """Starts hosts; none is left."""
    started: list[HostProcess] = []

    def start(*words: str) -> HostProcess:
        started.append(HostProcess(*words))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 whose context no run fills before it is ended."""
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", max_position_embeddings=4096)


def live(model: Path, session: Path) -> list[str]:
    return [str(model), "--tp", "2", "--ids", "3,14,15", "--session", str(session)]


def folded(session: Path) -> int:
    """The last step of a session, which must be one whole file."""
    assert [path.name for path in session.parent.glob("*.session*")] == [session.name]
    assert verify(session) == []
    with Session.open(session) as opened:
        return len(opened.steps()) - 1


def run_until(connection: Connection[HostFrame], step: int) -> None:
    """Have it run without an end, until a step was reported."""
    connection.send(RequestFrame(1, LineRequest("until 100000")))
    while not (isinstance(frame := connection.receive(), StepEvent) and frame.step >= step):
        continue


def framed(body: bytes) -> bytes:
    return pack("<I", len(body)) + body


_CALL = b"\x82\xa2id\x01\xa7request\x83\xa4type\xa4call\xa7command\xa4next\xa9arguments"
HOSTILE = {
    "4 GB announced": (pack("<I", 0xFFFFFFFF) + b"x" * 100, "a message of 4294967295 bytes"),
    "no map": (framed(b"\x01"), "not a message"),
    "a list for a key": (framed(_CALL + b"\x81\x91\x01\x02"), "Expected `str`, got `array`"),
    "nested": (framed(b"\x82\xa2id\x01\xa1x" + b"\x91" * 10_000 + b"\xc0"), "not a message"),
    "four billion arguments": (framed(_CALL + b"\xdf\xff\xff\xff\xff"), "truncated"),
    "half a frame": (framed(encode(RequestFrame(1, StateRequest())))[:-3], ""),
    "nothing": (b"", ""),
}


def test_junk_ends_the_connection_and_the_host_with_it(hosts: Callable[..., HostProcess]) -> None:
    started = {name: hosts(*_REPLAY) for name in HOSTILE}
    for name, (data, stated) in HOSTILE.items():
        host = started[name]
        with host.connect().socket as client:  # not waiting for it to be ready
            client.sendall(data)
            if not stated:
                client.shutdown(socket.SHUT_WR)
            host.ended()
        assert stated in (reported := host.printed()), name
        assert "Traceback" not in reported, name


def test_a_client_that_never_comes_is_not_waited_for(hosts: Callable[..., HostProcess]) -> None:
    """The lifeline shows it; and the last of both removes the folder."""
    host = hosts(*_REPLAY)
    while not (host.directory / "socket").exists():
        assert host.process.poll() is None, host.printed()
        time.sleep(0.02)
    host.folder.close()
    host.lifeline.close()
    host.process.wait(20)  # less than a host waits for a client
    assert "the client has ended before it came" in host.printed()
    assert not host.directory.exists()


@pytest.mark.slow
def test_a_signal_folds_the_session_and_ends_the_ranks(
    model: Path, hosts: Callable[..., HostProcess], tmp_path: Path
) -> None:
    """Also while its client is stopped and takes no byte; before that, the host waits for it."""
    session = tmp_path / "a.session"
    host = hosts(*live(model, session))
    connection = host.ready()
    run_until(connection, 3)
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    before = folded_steps(session)
    while folded_steps(session) < before + 20:  # nobody reads what it sends
        assert host.process.poll() is None
        time.sleep(0.05)
    host.process.send_signal(signal.SIGTERM)
    assert host.ended() == 128 + signal.SIGTERM
    last = folded(session)
    assert last > 20
    assert host.printed() == f"lockstep host: ended by SIGTERM; {session} is recorded up to step {last}\n"


def folded_steps(session: Path) -> int:
    with Session.open(session) as opened:
        return len(opened.steps())


@pytest.mark.slow
def test_a_host_ends_though_its_command_does_not(
    model: Path, hosts: Callable[..., HostProcess], tmp_path: Path
) -> None:
    """The rank that it waits for is stopped, and its client goes."""
    session = tmp_path / "a.session"
    host = hosts(*live(model, session))
    connection = host.ready()
    connection.send(RequestFrame(1, LineRequest("next 2")))
    while not isinstance(connection.receive(), AnswerFrame):
        pass
    host.ranks[1].suspend()
    connection.send(RequestFrame(2, LineRequest("next")))
    connection.close()
    host.ended()
    assert folded(session) == 1


@pytest.mark.slow
def test_the_recorder_of_a_reference_ends_with_the_client_of_its_host(
    model: Path, hosts: Callable[..., HostProcess], tmp_path: Path
) -> None:
    """Though it is stopped itself: nobody waits for it."""
    session = tmp_path / "a.session"
    host = hosts(*live(model, session))
    connection = host.ready()
    connection.send(RequestFrame(1, LineRequest("next 2")))
    connection.send(RequestFrame(2, LineRequest("golden")))
    recorder = None
    while recorder is None:
        assert host.process.poll() is None
        found = children_with("lockstep.workbench.references.record", host.process.pid)
        recorder = next(iter(found), None)
        time.sleep(0.02)
    recorder.suspend()
    connection.close()
    host.ended()
    assert folded(session) == 1
    recorder.wait(_PATIENCE)


@pytest.mark.slow
def test_a_recorder_is_got_ready_while_nothing_is_asked_for_and_ends_with_the_host(
    model: Path, hosts: Callable[..., HostProcess], tmp_path: Path
) -> None:
    host = hosts(*live(model, tmp_path / "a.session"))
    connection, deadline = host.ready(), time.monotonic() + _PATIENCE
    connection.send(RequestFrame(0, LineRequest("next")))
    while not (waiting := children_with("-", host.process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (recorder,) = waiting
    assert "lockstep.workbench.references.record" in recorder.cmdline()
    connection.send(RequestFrame(1, LineRequest("golden")))
    while not (isinstance(frame := connection.receive(), AnswerFrame) and frame.id == 1):
        assert {c.pid for c in psutil.Process(host.process.pid).children()} <= {
            recorder.pid,
            *(r.pid for r in host.ranks),
        }
    assert not isinstance(frame.answer, ErrorAnswer), frame.answer
    assert not recorder.is_running()
    connection.close()
    host.ended()


#: Commands that take long, write files, or end the host.
_LEFT_OUT = ("golden", "check", "diagnose", "export", "source", "quit", "until", "continue", "restart")


def any_request(chance: random.Random, commands: list[str]) -> Request:
    """A request that validates, of whatever content."""
    text = "".join(
        chance.choice("aZ09 .*[]()<>=-_\"'\\\x00\x1b\u202e\U0001f600") for _ in range(chance.randrange(40))
    )
    number = chance.choice([0, -1, 2**31, 2**63 - 1, -(2**63), 7])
    name = chance.choice(commands)
    arguments = {one.name: chance.choice([text, number, True, None]) for one in registry.find(name).arguments}
    return chance.choice(
        [
            LineRequest(f"{name} {text}"),
            LineRequest(text),
            CallRequest(name, arguments),
            CallRequest(text, {text: number}),
            TensorRequest(chance.choice([text, "layers.0.attn.q_proj"]), number, number),
            WeightRequest(text),
        ]
    )


def _answer(connection: Connection[HostFrame], number: int) -> AnswerFrame:
    """The answer to request `number`, which is interrupted when it takes long: "run" has no end."""
    patience: float | None = time.monotonic() + 2
    while True:
        left = None if patience is None else max(0.0, patience - time.monotonic())
        if patience is not None and (not left or not select.select([connection.socket], [], [], left)[0]):
            connection.send(RequestFrame(1_000_000 + number, InterruptRequest()))
            patience = None
        frame = connection.receive()
        if isinstance(frame, AnswerFrame) and frame.id == number:
            return frame


def fuzz(host: HostProcess, seed: int, requests: int) -> None:
    """Requests of any content, each of which must be answered, one that runs on and on when it is interrupted; then
    bytes, which end the host."""
    chance = random.Random(seed)
    with host.ready().socket as client:
        connection = Connection(client, Decoder(HostFrame))
        names = [one.name for one in registry.commands().values() if one.name not in _LEFT_OUT]
        for number in range(1, requests):
            asked = CallRequest("next", {"count": None}) if number == 1 else any_request(chance, names)
            connection.send(RequestFrame(number, asked))
            frame = _answer(connection, number)
            if isinstance(frame.answer, ErrorAnswer):
                assert frame.answer.error.kind != "InternalError", frame.answer.error.message
        body = bytearray(encode(RequestFrame(1, any_request(chance, names))))
        body[chance.randrange(len(body)) :] = chance.randbytes(chance.randrange(200))
        client.sendall(framed(bytes(body)) + chance.randbytes(50))
        client.shutdown(socket.SHUT_WR)
        host.ended()
    assert "Traceback" not in host.printed()


@pytest.mark.slow
def test_requests_of_any_content_are_answered(
    model: Path, hosts: Callable[..., HostProcess], tmp_path: Path
) -> None:
    fuzz(hosts(*live(model, tmp_path / "a.session")), 0, 60)
    folded(tmp_path / "a.session")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_requests_of_any_content_are_answered_thirty_times(
    model: Path, hosts: Callable[..., HostProcess], tmp_path: Path
) -> None:
    for seed in range(1, 31):
        session = tmp_path / f"{seed}.session"
        if seed % 5:
            fuzz(hosts(*_REPLAY), seed, 300)
        else:
            fuzz(hosts(*live(model, session)), seed, 60)
            folded(session)
            session.unlink()
