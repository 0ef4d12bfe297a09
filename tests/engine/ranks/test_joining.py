"""Host and rank prove themselves to each other before anything else; who stands between them changes nothing."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from msgspec.msgpack import encode

from lockstep.engine.config import EngineConfig
from lockstep.engine.errors import ConfigError
from lockstep.engine.ranks import joining
from lockstep.engine.ranks.joining import (
    CLAIM_BYTES,
    GREETING_BYTES,
    KEY_VARIABLE,
    Admission,
    Applicant,
    Member,
    Refusal,
    Role,
    address_of,
    join,
    prove,
    shared_secret,
)
from lockstep.engine.ranks.messages import COMMANDS, AddSequence, Command, LoadModel, Ping
from lockstep.engine.ranks.sealing import TAG_BYTES, Seal, Seals, derive
from lockstep.engine.ranks.wire import Connection, Disconnected, MalformedMessage

SECRET = b"1f0c5a" * 10
ADMITTED = Admission("cpu", 60.0, 1)
MESSAGES: list[Command] = [AddSequence(0, [1]), AddSequence(0, [2]), AddSequence(0, [3])]
Pair = Callable[[], tuple[socket.socket, socket.socket]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Makes two ends of a TCP connection."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def made() -> tuple[socket.socket, socket.socket]:
            near = stack.enter_context(socket.create_connection(server.getsockname(), timeout=30))
            far = stack.enter_context(server.accept()[0])
            far.settimeout(30)
            return near, far

        yield made


class Joining:
    """A rank that proves itself over `sock`, in a thread: what `prove` returned or raised."""

    def __init__(self, sock: socket.socket, secret: bytes = SECRET, role: Role = Role.COMMANDS) -> None:
        self.result: tuple[socket.socket, Seals, Admission] | ConfigError | None = None

        def run() -> None:
            try:
                self.result = prove(sock, "there", secret, 0, 1, role)
            except ConfigError as error:
                self.result = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def joined(self) -> tuple[socket.socket, Seals, Admission]:
        self._thread.join(30)
        assert isinstance(self.result, tuple), self.result
        return self.result

    def refused(self) -> str:
        self._thread.join(30)
        assert isinstance(self.result, ConfigError), self.result
        return str(self.result)


def heard(applicant: Applicant) -> Member:
    """The member that an applicant becomes."""
    while True:
        if (member := applicant.hear()) is not None:
            return member
        time.sleep(0.001)


def test_both_sides_hold_the_secret(pair: Pair) -> None:
    near, far = pair()
    joining = Joining(near)
    member = heard(Applicant(far, SECRET))
    assert (member.rank, member.size, member.role) == (0, 1, Role.COMMANDS)
    member.answer(ADMITTED)
    sock, seals, reported = joining.joined()
    assert reported == ADMITTED
    host, rank = Connection(far, COMMANDS, seals=member.seals), Connection(sock, COMMANDS, seals=seals)
    for message in (Ping(), AddSequence(0, list(range(100_000)))):
        for one, other in ((host, rank), (rank, host)):
            sender = threading.Thread(target=one.send, args=(message,))
            sender.start()
            assert other.receive() == message
            sender.join()


def test_a_rank_without_the_secret_is_sent_nothing_but_that(pair: Pair) -> None:
    near, far = pair()
    joining = Joining(near, b"somebody else's")
    with pytest.raises(Disconnected):
        heard(Applicant(far, SECRET))
    far.close()
    stated = joining.refused()
    assert "there and rank 0 did not prove the same secret" in stated
    assert KEY_VARIABLE in stated


def test_a_refusal_of_a_rank_that_holds_the_secret_reports_why(pair: Pair) -> None:
    near, far = pair()
    joining = Joining(near)
    heard(Applicant(far, SECRET)).answer(Refusal("torchrun has started 2 ranks"))
    assert joining.refused() == "the host at there refuses rank 0: torchrun has started 2 ranks"


class FakeHost:
    """It greets as a host does, and hears the claim, but does not hold the secret."""

    def __init__(self, pair: Pair) -> None:
        near, self.socket = pair()
        self.rank = Joining(near)
        self.socket.sendall(joining._PROTOCOL + b"n" * 32)
        self.claim = self.socket.recv(CLAIM_BYTES, socket.MSG_WAITALL)


def frame(message: bytes, tag: bytes) -> bytes:
    return struct.pack("<I", len(message)) + tag + message + tag


@pytest.mark.parametrize("kind", ["clear", "reflected", "own secret", "none"])
def test_a_host_without_the_secret_is_believed_nothing(pair: Pair, kind: str) -> None:
    """Neither an admission nor, which is what once made a rank send weights, a command: the rank reads no message."""
    host = FakeHost(pair)
    admission = encode(ADMITTED)
    proof = host.claim[-TAG_BYTES:]
    if kind == "clear":
        host.socket.sendall(struct.pack("<I", len(admission)) + admission + b"\0" * 64)
    elif kind == "reflected":  # the only thing that it has heard from somebody who holds the secret
        host.socket.sendall(frame(admission, proof))
    elif kind == "own secret":
        keys = joining._Keys.of(b"another secret", b"n" * 32, host.claim[:-TAG_BYTES])
        Connection(host.socket, COMMANDS, seals=Seals(Seal(keys.to_host), Seal(keys.to_rank))).send(ADMITTED)
    host.socket.shutdown(socket.SHUT_WR)
    assert "did not prove the same secret" in host.rank.refused()


def test_a_proof_is_of_one_connection_one_rank_and_one_role(pair: Pair) -> None:
    """Recorded and sent again, or with another rank, size or role in it, it proves nothing."""
    near, far = pair()
    Joining(near)
    applicant = Applicant(far, SECRET)
    claim = b""
    while len(claim) < CLAIM_BYTES:
        try:
            claim += far.recv(CLAIM_BYTES - len(claim))
        except BlockingIOError:
            time.sleep(0.001)
    changed = [bytearray(claim) for _ in range(CLAIM_BYTES)]
    for place, one in enumerate(changed):
        one[place] ^= 1
    for sent in changed:
        again, host = pair()
        fresh = Applicant(host, SECRET)
        fresh._nonce = applicant._nonce
        again.sendall(sent)
        with pytest.raises(Disconnected, match="does not hold"):
            heard(fresh)
    replayed, host = pair()
    fresh = Applicant(host, SECRET)  # with a nonce of its own
    replayed.sendall(claim)
    with pytest.raises(Disconnected, match="does not hold"):
        heard(fresh)


def test_what_is_no_host_is_named(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = pair()
    rank = Joining(near)
    far.sendall(
        b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3 and so on\r\n"[:GREETING_BYTES].ljust(GREETING_BYTES)
    )
    assert "no host of this version" in rank.refused()
    monkeypatch.setattr(joining, "HANDSHAKE_SECONDS", 0.3)
    near, far = pair()
    rank = Joining(near)

    def drip() -> None:
        try:
            while True:
                far.sendall(joining._PROTOCOL[:1])
                time.sleep(0.05)
        except OSError:
            return

    dripping = threading.Thread(target=drip)
    dripping.start()
    assert "greets as a host of lockstep does: the other side is gone: timed out" in rank.refused()
    near.close()
    dripping.join(30)


# --- what follows the handshake -------------------------------------------------------------------------


def seals(purpose: bytes = b"") -> tuple[Seals, Seals]:
    """The host's and the rank's of one connection."""
    to_rank, to_host = (derive(SECRET, b"nonces", purpose + use) for use in (b"rank", b"host"))
    return Seals(Seal(to_host), Seal(to_rank)), Seals(Seal(to_rank), Seal(to_host))


def recorded(side: Seals) -> list[bytes]:
    """The frames of MESSAGES as they go over the wire."""
    near, far = socket.socketpair()
    frames = []
    with near, far:
        for message in MESSAGES:
            Connection(near, COMMANDS, seals=side).send(message)
            frames.append(far.recv(1 << 16))
    return frames


def received(data: bytes) -> list[Command]:
    """What a rank takes from a host of these bytes, until it ends in an error."""
    near, far = socket.socketpair()
    found: list[Command] = []
    with near, far:
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        rank = Connection(far, COMMANDS, seals=seals()[1])
        try:
            while True:
                found.append(rank.receive())
        except MalformedMessage as error:
            assert "altered, repeated, moved or left out" in str(error)  # noqa: PT017 - what came before is reported as well
            found.append(Ping())
        except Disconnected:
            pass
    return found


def test_frames_arrive_as_they_were_sent() -> None:
    assert received(b"".join(recorded(seals()[0]))) == MESSAGES


def test_a_flipped_bit_anywhere_is_noticed_before_anything_is_decoded() -> None:
    """A length as well: it is never waited for."""
    first, second, third = recorded(seals()[0])
    for place in range(len(second)):
        for bit in (1, 128):
            changed = bytearray(second)
            changed[place] ^= bit
            assert received(first + changed + third) == [MESSAGES[0], Ping()], place


def test_frames_dropped_repeated_moved_or_reflected_are_noticed() -> None:
    one, two, three = recorded(seals()[0])
    back = recorded(seals()[1])[0]
    elsewhere = recorded(seals(b"the board's")[0])[0]
    head, tampered = [MESSAGES[0]], [Ping()]
    assert received(two + three) == tampered
    assert received(one + three) == head + tampered
    assert received(one + one + two) == head + tampered
    assert received(one + three + two) == head + tampered
    assert received(back) == tampered
    assert received(elsewhere) == tampered
    assert received(one + two[:20] + three) == head + tampered
    assert received(one + two[:-1]) == head  # the stream ends within a message: the other side is gone
    for cut in range(1, len(one)):
        assert received(one[:cut]) == []


def test_a_tampered_load_is_never_seen(pair: Pair) -> None:
    """A relay rewrites the path of a checkpoint."""
    near, far = pair()
    host, rank = seals()
    Connection(near, COMMANDS, seals=host).send(LoadModel("/models/ours", EngineConfig()))
    through = far.recv(1 << 16)
    relayed, end = pair()
    relayed.sendall(through.replace(b"/models/ours", b"/models/mine"))
    with pytest.raises(MalformedMessage, match="tampers with the connection"):
        Connection(end, COMMANDS, seals=rank).receive()


# --- the secret -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", "a short phrase", "0123456789abcdef" + "f" * 15, "x" * 64])
def test_a_secret_that_could_be_guessed_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, value)
    with pytest.raises(ConfigError, match="openssl rand -hex 32"):
        shared_secret()


def test_keys_are_derived_as_rfc_5869_states() -> None:
    """Its first test case, whose output is 42 bytes: the first block."""
    found = derive(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert found.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


def test_a_rank_that_finds_no_host_reports_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConfigError, match="no host listens"):
        join(("127.0.0.1", port), SECRET, 0, 1, Role.COMMANDS, patience=0)
    with pytest.raises(ConfigError, match="HOST:PORT"):
        address_of("nowhere")
