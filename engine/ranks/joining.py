"""How a rank that its host did not start, and that host, prove themselves to each other over TCP (torch-free).

    host → rank    Challenge
    rank → host    JoinRequest: its proof, a challenge of its own, who it is
    host → rank    Admission: the host's proof and how to run; or Refusal

A proof is HMAC-SHA256(key, side + challenge). Each rank opens two connections: one for commands, one for its place on
the progress board. Both sides hold the same key, in the environment. It keeps strangers out; what is sent afterwards
is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import time
from enum import StrEnum
from typing import Literal, NoReturn

from msgspec import Struct
from msgspec.msgpack import Decoder

from engine.errors import ConfigError
from engine.ranks.progress import Standing
from engine.ranks.wire import Connection, Disconnected

KEY_VARIABLE = "LOCKSTEP_KEY"
#: Bytes of a message that somebody may send who has not proven anything yet.
MOST_UNPROVEN = 1024
#: Seconds in which one who connects has to prove who it is.
HANDSHAKE_SECONDS = 5.0
#: How often either side of the board's connection looks whether it has news for the other.
RELAY_SECONDS = 0.02
_CHALLENGE_BYTES = 32


class Role(StrEnum):
    """What a rank's connection carries."""

    COMMANDS = "commands"
    BOARD = "board"


class Challenge(Struct, frozen=True, tag="challenge"):
    """To be answered with a proof that one holds the key."""

    challenge: bytes


class JoinRequest(Struct, frozen=True, tag="join"):
    """Who a rank is."""

    proof: bytes
    challenge: bytes
    rank: int
    size: int
    role: Role


class Admission(Struct, frozen=True, tag="admission"):
    """The rank belongs to the run. `threads`: of each rank, 0 for its share of the cores."""

    proof: bytes
    device: str
    timeout: float
    threads: int


class Refusal(Struct, frozen=True, tag="refusal"):
    """The rank may not join."""

    message: str


class PauseWish(Struct, frozen=True):
    """Whether the host wants the ranks to pause, over the board's connection; the rank sends its `Standing`."""

    wanted: bool


_REQUESTS: Decoder[JoinRequest] = Decoder(JoinRequest)
_REPLIES: Decoder[Challenge | Admission | Refusal] = Decoder(Challenge | Admission | Refusal)
PAUSES: Decoder[PauseWish] = Decoder(PauseWish)
STANDINGS: Decoder[Standing] = Decoder(Standing)


def shared_key() -> bytes:
    """The secret that host and ranks share; ConfigError where none is set."""
    value = os.environ.get(KEY_VARIABLE, "")
    if len(value) < 16:
        raise ConfigError(
            f"ranks that are started elsewhere need a secret: set {KEY_VARIABLE} to the same 16 or more "
            "characters here and where torchrun is called"
        )
    return value.encode()


def address_of(text: str) -> tuple[str, int]:
    """ "HOST:PORT" as a pair; ConfigError for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 1 << 16:
        raise ConfigError(f"an address is HOST:PORT, not {text!r}")
    return host.strip("[]"), int(port)


class Applicant:
    """The host's side: one that has connected and is to prove itself. Disconnected where it does not."""

    def __init__(self, sock: socket.socket, key: bytes) -> None:
        self.socket, self._key = sock, key
        self._connection = Connection(sock, _REQUESTS)
        sock.settimeout(HANDSHAKE_SECONDS)
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        self._connection.send(Challenge(challenge))
        self.request = self._connection.receive(MOST_UNPROVEN)
        if not hmac.compare_digest(self.request.proof, _proof(key, "rank", challenge)):
            self.refuse(f"the key is not the host's: set {KEY_VARIABLE} alike on both sides")

    def admit(self, device: str, timeout: float, threads: int) -> None:
        """Let it in: it learns how to run."""
        proof = _proof(self._key, "host", self.request.challenge)
        self._connection.send(Admission(proof, device, timeout, threads))
        tune(self.socket)

    def refuse(self, why: str) -> NoReturn:
        """Tell it why it may not join; always raises Disconnected."""
        self._connection.send(Refusal(why))
        raise Disconnected(why)


def join(
    address: tuple[str, int], key: bytes, rank: int, size: int, role: Role, patience: float = 60.0
) -> tuple[socket.socket, Admission]:
    """The rank's side: a socket that the host has admitted, and what the host says of the run. The ranks
    may be there before the host: for `patience` seconds they knock again."""
    sock = _connect(address, time.monotonic() + patience)
    connection = Connection(sock, _REPLIES)
    at = f"the host at {address[0]}:{address[1]}"
    asked = connection.receive(MOST_UNPROVEN)
    if not isinstance(asked, Challenge):
        raise ConfigError(f"{at} does not speak this protocol")
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.send(JoinRequest(_proof(key, "rank", asked.challenge), challenge, rank, size, role))
    answer = connection.receive(MOST_UNPROVEN)
    if isinstance(answer, Refusal):
        raise ConfigError(f"{at} refuses this rank: {answer.message}")
    if not isinstance(answer, Admission) or not hmac.compare_digest(
        answer.proof, _proof(key, "host", challenge)
    ):
        raise ConfigError(f"{at} does not hold the key: set {KEY_VARIABLE} alike on both sides")
    tune(sock)
    return sock, answer


def _connect(address: tuple[str, int], deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=HANDSHAKE_SECONDS)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(f"no host listens at {address[0]}:{address[1]}: {error}") from error
            time.sleep(0.2)


def tune(sock: socket.socket) -> None:
    """Send at once; no time limit on reading, but a peer whose machine is gone is noticed within half a minute."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # not every system lets it be set
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _proof(key: bytes, side: Literal["rank", "host"], challenge: bytes) -> bytes:
    return hmac.new(key, side.encode() + challenge, hashlib.sha256).digest()
