"""How a rank that its host did not start proves who it is (torch-free): a challenge over TCP.

    host -> rank    {"challenge": 32 random bytes}
    rank -> host    {"proof": HMAC-SHA256(key, challenge), "rank": r, "size": n, "role": "commands" | "board"}
    host -> rank    {"ok": true, "device", "timeout", "threads"}, or {"ok": false, "message"}

Each rank opens two connections: one for commands, one for its place on the progress board. Both sides hold the
same key, in the environment. It keeps strangers out; what is sent afterwards is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from engine.errors import ConfigError
from engine.ranks.wire import MAPS, Connection, Disconnected

KEY_VARIABLE = "LOCKSTEP_KEY"
#: Bytes of a message that somebody may send who has not proven anything yet.
MOST_UNPROVEN = 1024
#: Seconds in which one who connects has to prove who it is.
HANDSHAKE_SECONDS = 5.0
#: How often either side of the board's connection looks whether it has news for the other.
RELAY_SECONDS = 0.02

Role = Literal["commands", "board"]


@dataclass(frozen=True, slots=True)
class Joining:
    """What a rank says of itself."""

    rank: int
    size: int
    role: Role


def key() -> bytes:
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


def admit(connection: Connection[dict[str, Any]], secret: bytes) -> Joining:
    """The host's side of the challenge; Disconnected for one that fails it."""
    challenge = secrets.token_bytes(32)
    connection.socket.settimeout(HANDSHAKE_SECONDS)
    connection.send({"challenge": challenge})
    said = connection.receive(MOST_UNPROVEN)
    proof = said.get("proof")
    if not isinstance(proof, bytes) or not hmac.compare_digest(proof, _proof(secret, challenge)):
        refuse(connection, f"the key is not the host's: set {KEY_VARIABLE} alike on both sides")
    role: Role = "board" if said["role"] == "board" else "commands"
    return Joining(int(said["rank"]), int(said["size"]), role)


def refuse(connection: Connection[dict[str, Any]], why: str) -> NoReturn:
    """Tell one that wants to join why it may not; always raises Disconnected."""
    connection.send({"ok": False, "message": why})
    raise Disconnected(why)


def join(
    address: tuple[str, int], secret: bytes, joining: Joining, patience: float = 60.0
) -> tuple[Connection[dict[str, Any]], dict[str, Any]]:
    """The rank's side: a connection that the host has admitted, and what the host says of the run. The ranks
    may be there before the host: for `patience` seconds they knock again."""
    connection = Connection(_connect(address, time.monotonic() + patience), MAPS)
    challenge = connection.receive(MOST_UNPROVEN)["challenge"]
    connection.send(
        {
            "proof": _proof(secret, challenge),
            "rank": joining.rank,
            "size": joining.size,
            "role": joining.role,
        }
    )
    answer = connection.receive(MOST_UNPROVEN)
    if not answer["ok"]:
        raise ConfigError(f"the host at {address[0]}:{address[1]} refuses this rank: {answer['message']}")
    tune(connection.socket)
    return connection, answer


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


def _proof(secret: bytes, challenge: bytes) -> bytes:
    return hmac.new(secret, challenge, hashlib.sha256).digest()
