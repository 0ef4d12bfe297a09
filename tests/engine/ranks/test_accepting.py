"""A host that awaits its ranks: strangers neither get in nor keep the ranks out."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from lockstep.engine.config import EngineConfig
from lockstep.engine.errors import ConfigError, RankTimeout
from lockstep.engine.parallel.operations import Note, OpKind
from lockstep.engine.ranks import accepting, joining
from lockstep.engine.ranks.accepting import MOST_STRANGERS, accept_ranks
from lockstep.engine.ranks.environment import rank_environment
from lockstep.engine.ranks.joining import (
    KEY_VARIABLE,
    PAUSES,
    PauseWish,
    Role,
    Standing,
    address_of,
    join,
    shared_secret,
)
from lockstep.engine.ranks.messages import COMMANDS, AddSequence, Leave, Ping
from lockstep.engine.ranks.progress import ProgressBoard
from lockstep.engine.ranks.remote import RemoteRank
from lockstep.engine.ranks.reports import CommandFailure
from lockstep.engine.ranks.sealing import Seals
from lockstep.engine.ranks.vitals import Vitals
from lockstep.engine.ranks.wire import Connection, Disconnected, MalformedMessage

SECRET = "5a1c0f9e" * 8


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the host listens; the key is set."""
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


class Host:
    """`accept_ranks` in a thread, for ranks that the test plays itself."""

    def __init__(self, address: str, tp: int) -> None:
        self.board, self.ranks, self.warnings = ProgressBoard.create(tp), list[RemoteRank](), list[str]()
        config = EngineConfig(tp=tp, listen=address)
        self._thread = threading.Thread(
            target=lambda: self.ranks.extend(accept_ranks(config, self.board, "p", self.warnings.append)),
            daemon=True,
        )
        self._thread.start()

    def joined(self) -> list[RemoteRank]:
        self._thread.join(60)
        assert self.ranks
        return self.ranks

    def close(self) -> None:
        for rank in self.joined():
            rank.end(0)
        if not self.board.closed:
            self.board.close()


@pytest.fixture
def host(address: str) -> Iterator[Host]:
    """A host that awaits one rank."""
    made = Host(address, 1)
    yield made
    made.close()


class Rank:
    """A rank, as far as its connections go."""

    def __init__(self, address: str, rank: int = 0, size: int = 1) -> None:
        self.sockets: list[socket.socket] = []
        self.seals: list[Seals] = []
        for role in Role:
            sock, seals, self.admission = join(address_of(address), shared_secret(), rank, size, role)
            sock.settimeout(30)
            self.sockets.append(sock)
            self.seals.append(seals)

    @property
    def line(self) -> Connection[PauseWish]:
        """To the board."""
        return Connection(self.sockets[Role.BOARD], PAUSES, seals=self.seals[Role.BOARD])

    def close(self) -> None:
        """Leave without a word."""
        for sock in self.sockets:
            sock.close()


@pytest.fixture
def rank(address: str, host: Host) -> Iterator[Rank]:
    """The rank of that host."""
    made = Rank(address)
    host.joined()
    yield made
    made.close()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_strangers_are_turned_away_and_counted_and_the_ranks_still_join(address: str, host: Host) -> None:
    where, secret = address_of(address), shared_secret()
    with pytest.raises(ConfigError, match="did not prove the same secret"):
        join(where, b"somebody else's secret", 0, 1, Role.COMMANDS)
    with pytest.raises(ConfigError, match="started 2 ranks, but the host was given --tp 1"):
        join(where, secret, 1, 2, Role.COMMANDS)
    with pytest.raises(ConfigError, match="no rank 7"):
        join(where, secret, 7, 1, Role.COMMANDS)
    for junk in (b"GET / HTTP/1.1\r\n\r\n".ljust(200), b"\xff" * 400, b""):
        with connected(address) as stranger, suppress(OSError):
            stranger.sendall(junk)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):  # the greeting, then the door
                pass
    commands, _, reported = join(where, secret, 0, 1, Role.COMMANDS)
    assert (reported.device, reported.timeout) == ("cpu", 60.0)
    with pytest.raises(ConfigError, match="rank 0 has joined already"):
        join(where, secret, 0, 1, Role.COMMANDS)
    line, _, _ = join(where, secret, 0, 1, Role.BOARD)
    host.joined()
    first, total = host.warnings
    assert f"connected to {address} from 127.0.0.1 and did not prove the secret" in first
    assert total == f"4 connections to {address} did not prove the secret"
    for sock in (commands, line):
        sock.close()


def test_the_silent_and_the_slow_stop_nobody(address: str, host: Host) -> None:
    """As many as there is room for, and more."""
    with ExitStack() as stack:
        for _ in range(MOST_STRANGERS + 20):
            stranger = stack.enter_context(connected(address))
            stranger.sendall(b"x")
        rank = Rank(address)
        host.joined()
        rank.close()
    first, total = host.warnings
    assert "did not prove" in first
    assert int(total.split()[0]) >= 18  # those beyond the bound


def test_a_handshake_has_one_deadline_however_its_bytes_trickle(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "HANDSHAKE_SECONDS", 0.5)
    monkeypatch.setattr(accepting, "_LOOK_SECONDS", 0.05)
    host = Host(address, 1)
    with connected(address) as stranger:
        assert _drip(stranger, joining.CLAIM_BYTES - 1) < joining.CLAIM_BYTES // 2
    rank = Rank(address)
    host.close()
    rank.close()


def _drip(sock: socket.socket, most: int) -> int:
    """How many bytes it takes, one every tenth of a second, before the other side hangs up."""
    for count in range(most):
        try:
            sock.sendall(b"x")
        except OSError:
            return count
        time.sleep(0.1)
    return most


def connected(address: str) -> socket.socket:
    """A connection to a host that is about to listen."""
    return joining._connect(address_of(address), time.monotonic() + 30)


def test_a_rank_that_ended_while_others_are_awaited_may_come_again(address: str) -> None:
    """Also one that has reported on the board's connection that it lives, as it does once a second."""
    host = Host(address, 2)
    gone = Rank(address, 0, 2)
    gone.line.send(Standing(b"", 4321, 1.5))
    gone.close()
    again: list[Rank] = []

    def admitted() -> bool:
        with suppress(ConfigError):
            again.append(Rank(address, 0, 2))
        return bool(again)

    eventually(admitted)
    other = Rank(address, 1, 2)
    assert [rank.rank for rank in host.joined()] == [0, 1]
    host.close()
    for rank in (*again, other):
        rank.close()


def test_the_board_carries_places_and_the_wish_to_pause(host: Host, rank: Rank) -> None:
    there = ProgressBoard.create(1)
    there.write(0, 99, 3, 17, 20, OpKind.ALL_REDUCE, True)
    rank.line.send(Standing(there.ring(0), 4321, 1.5))
    eventually(lambda: host.board.latest(0) == Note(99, OpKind.ALL_REDUCE, 3, 17, 20, True))
    assert host.joined()[0].vitals() == Vitals(4321, "", 1.5)
    there.close()
    for wanted in (True, False):
        host.board.ask_to_pause(wanted)
        assert rank.line.receive() == PauseWish(wanted)


def test_ranks_hear_that_the_host_has_closed(host: Host, rank: Rank) -> None:
    host.close()
    for sock in rank.sockets:
        assert not sock.recv(1)


def test_a_tampered_answer_loses_the_rank_and_reports_why(host: Host, rank: Rank) -> None:
    """On its connection for commands as well as on the board's, which takes the other with it."""
    commands = Connection(rank.sockets[Role.COMMANDS], COMMANDS, seals=rank.seals[Role.COMMANDS])
    remote = host.joined()[0]
    remote.connection.send(Ping())
    assert commands.receive() == Ping()
    rank.sockets[Role.COMMANDS].sendall(b"\x05\x00\x00\x00GET /".ljust(100))
    with pytest.raises(Disconnected, match="tampers with the connection"):
        remote.connection.receive()
    rank.sockets[Role.BOARD].sendall(b"\x05\x00\x00\x00GET /".ljust(100))
    with pytest.raises(Disconnected, match="closed"):
        commands.receive()
    eventually(lambda: "tampers with the connection" in remote.epitaph())
    assert "its connection from 127.0.0.1 broke (a message was altered" in remote.epitaph()
    with pytest.raises(Disconnected):
        remote.connection.send(Leave())


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_addresses_may_be_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        address = f"[::1]:{server.getsockname()[1]}"
    host = Host(address, 1)
    rank = Rank(address)
    assert host.joined()[0].where == "::1"
    host.close()
    rank.close()


class Relay:
    """Stands between a rank and its host, without the secret: passes on what `change` makes of it."""

    def __init__(self, host: str) -> None:
        self.change: Callable[[bytes], bytes] = lambda data: data
        self._host = address_of(host)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with self._server:
            for _ in Role:
                near = self._server.accept()[0]
                far = joining._connect(self._host, time.monotonic() + 30)
                far.settimeout(None)
                for way in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=way, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with source, suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(self.change(data))
            sink.shutdown(socket.SHUT_WR)


def test_a_relay_may_pass_messages_on_but_not_change_them(address: str, host: Host) -> None:
    relay = Relay(address)
    rank = Rank(relay.address)
    commands = Connection(rank.sockets[Role.COMMANDS], COMMANDS, seals=rank.seals[Role.COMMANDS])
    remote = host.joined()[0]
    for tokens in ([11, 12], [13]):
        remote.connection.send(AddSequence(0, tokens))
        assert commands.receive() == AddSequence(0, tokens)
    relay.change = lambda data: data.replace(bytes([14, 15]), bytes([99, 15]))
    remote.connection.send(AddSequence(0, [14, 15]))
    with pytest.raises(MalformedMessage, match="tampers with the connection"):
        commands.receive()
    relay.change = lambda data: data.replace(b"a secret", b"a rumour")
    commands.send(CommandFailure("RequestError", True, "a secret", ""))
    with pytest.raises(MalformedMessage, match="tampers with the connection"):
        remote.connection.receive()
    rank.close()


def test_the_kernel_watches_for_machines_that_are_out_of_reach(host: Host, rank: Rank) -> None:
    """On both sides; on the board's connection also while something is under way (tests/e2e/test_machines.py)."""
    remote = host.joined()[0]
    boards, commands = (remote.line.socket, rank.sockets[Role.BOARD]), rank.sockets[Role.COMMANDS]
    for sock in (*boards, remote.connection.socket, commands):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        for sock in boards:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
        assert commands.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_a_rank_without_torchrun_or_secret_reports_it(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="start this program with torchrun"):
        rank_environment(address)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(ConfigError, match="openssl rand"):
        rank_environment(address)


def test_the_host_names_the_ranks_that_did_not_come(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "JOIN_SECONDS", 0.1)
    config, board, warned = EngineConfig(tp=2, listen=address), ProgressBoard.create(2), list[str]()
    with pytest.raises(RankTimeout, match=f"rank 0, 1 did not come.*torchrun … -m prog {address}"):
        accept_ranks(config, board, "-m prog", warned.append)
    with socket.create_server(address_of(address)), pytest.raises(ConfigError, match="cannot listen"):
        accept_ranks(config, board, "prog", warned.append)
    board.close()
    assert not warned
