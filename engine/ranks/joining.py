"""How a rank that its host did not start, and that host, prove themselves to each other over TCP (torch-free).

    host → rank    greeting: the protocol's name, a nonce
    rank → host    claim: a nonce, its rank, the number of ranks, its role; the proof that it holds the secret
    host → rank    Admission: how to run; or Refusal. Sealed, and so the host's own proof

Greeting and claim have a fixed size: nothing that a stranger sends is decoded. The proof and the keys of all that
follows (`engine.ranks.sealing`) are derived from the secret, both nonces and the claim. Each rank opens two
connections: one for commands, one for its place on the progress board.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.msgpack import Decoder

from lockstep.engine.errors import ConfigError
from lockstep.engine.ranks.progress import RING_BYTES
from lockstep.engine.ranks.sealing import TAG_BYTES, Seal, Seals, derive
from lockstep.engine.ranks.wire import Connection, Disconnected

KEY_VARIABLE = "LOCKSTEP_KEY"
#: What the secret has at least: characters, and different ones among them. 16 random bytes in hexadecimal have more.
_KEY_CHARACTERS, _KEY_DIFFERENT = 32, 8
#: Seconds for a whole handshake, however its bytes trickle in.
HANDSHAKE_SECONDS = 10.0
#: Seconds for which a machine may be out of reach before its ranks, or its host, count as lost: at most, and half of
#: the host's patience, so that a rank is called lost before it is called silent.
_NETWORK_SECONDS = 20
#: How often either side of the board's connection looks whether it has news for the other.
RELAY_SECONDS = 0.02
#: How often a rank shows that it lives while nothing changes.
SIGN_OF_LIFE_SECONDS = 1.0

_PROTOCOL = b"lockstep ranks 2\n"
_NONCE_BYTES = 32
GREETING_BYTES = len(_PROTOCOL) + _NONCE_BYTES
_CLAIM = struct.Struct(f"<{_NONCE_BYTES}sIII")
CLAIM_BYTES = _CLAIM.size + TAG_BYTES


class Role(IntEnum):
    """What a rank's connection carries."""

    COMMANDS = 0
    BOARD = 1


class Admission(Struct, frozen=True, tag="admission"):
    """The rank belongs to the run. `threads`: of each rank, 0 for its share of the cores."""

    device: str
    timeout: float
    threads: int


class Refusal(Struct, frozen=True, tag="refusal"):
    """The rank holds the secret, but may not join."""

    message: str


class PauseWish(Struct, frozen=True):
    """Whether the host wants the ranks to pause, over the board's connection."""

    wanted: bool


class Standing(Struct, frozen=True):
    """What a rank sends over the board's connection, when it has changed and as a sign of life: its ring on the board
    as it is, its process and the processor seconds used so far."""

    ring: Annotated[bytes, Meta(min_length=RING_BYTES, max_length=RING_BYTES)]
    pid: int
    processor: float


_REPLIES: Decoder[Admission | Refusal] = Decoder(Admission | Refusal)
PAUSES: Decoder[PauseWish] = Decoder(PauseWish)
STANDINGS: Decoder[Standing] = Decoder(Standing)


def shared_secret() -> bytes:
    """The secret that host and ranks share; ConfigError where none is set, or one that could be guessed: whoever
    has watched a handshake, or has played one side of it, may try guesses as fast as a GPU can."""
    value = os.environ.get(KEY_VARIABLE, "")
    if len(value) < _KEY_CHARACTERS or len(set(value)) < _KEY_DIFFERENT:
        raise ConfigError(
            f"ranks that are started elsewhere need a random secret of {_KEY_CHARACTERS} or more characters: set "
            f"{KEY_VARIABLE} to the same output of `openssl rand -hex 32` here and where torchrun is called"
        )
    return value.encode()


def address_of(text: str) -> tuple[str, int]:
    """ "HOST:PORT" as a pair; ConfigError for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 1 << 16:
        raise ConfigError(f"an address is HOST:PORT, not {text!r}")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class _Keys:
    proof: bytes
    to_host: bytes
    to_rank: bytes

    @classmethod
    def of(cls, secret: bytes, host_nonce: bytes, claim: bytes) -> _Keys:
        """`claim` is the rank's, without its proof. Every key is bound to all of it."""
        nonces = host_nonce + claim[:_NONCE_BYTES]
        return cls(*(derive(secret, nonces, _PROTOCOL + claim + use) for use in (b"proof", b"host", b"rank")))


class Applicant:
    """The host's side of one connection, from the address `where`, that has not proved anything yet. Its socket never
    blocks."""

    def __init__(self, sock: socket.socket, secret: bytes, where: str = "") -> None:
        self.socket, self._secret, self.where = sock, secret, where
        self.deadline = time.monotonic() + HANDSHAKE_SECONDS
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._heard = b""
        sock.setblocking(False)
        sock.send(_PROTOCOL + self._nonce)  # the first bytes of a connection: its buffer has room

    def hear(self) -> Member | None:
        """Take what has arrived; a member once the claim is whole. Disconnected where it does not prove the secret."""
        try:
            data = self.socket.recv(CLAIM_BYTES - len(self._heard))
        except BlockingIOError:
            return None
        except OSError as error:
            raise Disconnected(str(error)) from error
        if not data:
            raise Disconnected("it left")
        self._heard += data
        if len(self._heard) < CLAIM_BYTES:
            return None
        claim, proof = self._heard[: _CLAIM.size], self._heard[_CLAIM.size :]
        keys = _Keys.of(self._secret, self._nonce, claim)
        _, rank, size, role = _CLAIM.unpack(claim)
        if not hmac.compare_digest(proof, keys.proof) or role not in list(Role):
            raise Disconnected("it does not hold the secret")
        return Member(self.socket, Seals(Seal(keys.to_host), Seal(keys.to_rank)), rank, size, Role(role))


@dataclass(frozen=True, slots=True)
class Member:
    """One connection of a rank that has proved the secret, on the host's side."""

    socket: socket.socket
    seals: Seals
    rank: int
    size: int
    role: Role

    def answer(self, answer: Admission | Refusal) -> None:
        """Reply whether it may join. Disconnected where it is gone."""
        Connection(
            self.socket, _REPLIES, seals=self.seals, deadline=time.monotonic() + HANDSHAKE_SECONDS
        ).send(answer)
        if isinstance(answer, Admission):
            tune(self.socket, self.role, answer.timeout)


def join(
    address: tuple[str, int], secret: bytes, rank: int, size: int, role: Role, patience: float = 60.0
) -> tuple[socket.socket, Seals, Admission]:
    """The rank's side: a socket whose other end has proved to be the host, its seals, and what the host states of the
    run. The ranks may be there before the host: for `patience` seconds they knock again. ConfigError states why
    a rank could not join."""
    sock = _connect(address, time.monotonic() + patience)
    try:
        return prove(sock, f"{address[0]}:{address[1]}", secret, rank, size, role)
    except BaseException:
        sock.close()
        raise


def prove(
    sock: socket.socket, at: str, secret: bytes, rank: int, size: int, role: Role
) -> tuple[socket.socket, Seals, Admission]:
    """`join`, over a socket that is connected `at` some address."""
    connection = Connection(sock, _REPLIES, 1 << 16, deadline=time.monotonic() + HANDSHAKE_SECONDS)
    try:
        greeting = bytes(connection.exactly(GREETING_BYTES))
    except Disconnected as error:
        raise ConfigError(f"nothing at {at} greets as a host of lockstep does: {error}") from error
    if not greeting.startswith(_PROTOCOL):
        raise ConfigError(f"what listens at {at} is no host of this version of lockstep")
    claim = _CLAIM.pack(secrets.token_bytes(_NONCE_BYTES), rank, size, role)
    keys = _Keys.of(secret, greeting[len(_PROTOCOL) :], claim)
    connection.seals = Seals(Seal(keys.to_rank), Seal(keys.to_host))
    try:
        sock.sendall(claim + keys.proof)
        answer = connection.receive()
    except OSError as error:
        raise ConfigError(
            f"the host at {at} and rank {rank} did not prove the same secret to each other: set {KEY_VARIABLE} alike "
            "on both sides"
        ) from error
    if isinstance(answer, Refusal):
        raise ConfigError(f"the host at {at} refuses rank {rank}: {answer.message}")
    tune(sock, role, answer.timeout)
    return sock, connection.seals, answer


def _connect(address: tuple[str, int], deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=HANDSHAKE_SECONDS)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(f"no host listens at {address[0]}:{address[1]}: {error}") from error
            time.sleep(0.2)


def tune(sock: socket.socket, role: Role, patience: float) -> None:
    """Send at once; no time limit on reading, but a peer whose machine is out of reach is noticed. On the board's
    connection also when something is under way to it: not on the commands', whose reader may be busy for long."""
    seconds = max(4, min(_NETWORK_SECONDS, int(patience / 2)))
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": seconds // 4, "TCP_KEEPINTVL": seconds // 4, "TCP_KEEPCNT": 3}
    if role == Role.BOARD:
        options["TCP_USER_TIMEOUT"] = 1000 * seconds
    for name, value in options.items():
        if hasattr(socket, name):  # not every system lets it be set
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
