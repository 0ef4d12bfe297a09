"""Ranks that torchrun has started, on this machine or on others, as their host sees them (torch-free).

The host listens; every rank connects, proves itself (`engine.ranks.joining`) and serves commands as any rank does.
A thread a rank carries its place to the host's progress board and the host's wish to pause back to it, so that
a hung or dead rank is reported just as a local one is. When the host closes a connection, or dies, the rank
at the other end ends itself.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError, RankTimeout
from engine.ranks.joining import RELAY_SECONDS, Joining, Role, address_of, admit, key, refuse, tune
from engine.ranks.progress import ProgressBoard
from engine.ranks.wire import MAPS, Connection, Disconnected

#: Seconds for which the host waits for all ranks to come: somebody starts them by hand.
JOIN_SECONDS = 600.0
#: How often the host looks, while it waits, whether one that had come is gone again.
_LOOK_SECONDS = 0.5


@dataclass(slots=True)
class RemoteRank:
    """One rank of torchrun's."""

    rank: int
    connection: Connection[dict[str, Any]]
    board: Connection[dict[str, Any]]
    where: str
    relay: threading.Thread = field(init=False)

    def watch(self, board: ProgressBoard) -> None:
        """Start to carry news between this rank and the host's board."""
        self.relay = threading.Thread(
            target=self._carry, args=(board,), daemon=True, name=f"rank {self.rank}"
        )
        self.relay.start()

    def _carry(self, board: ProgressBoard) -> None:
        told = False
        try:
            while True:
                readable, _, _ = select.select([self.board], [], [], RELAY_SECONDS)
                if readable:
                    board.write(self.rank, *self.board.receive()["standing"])
                if board.pause_wanted != told:
                    told = not told
                    self.board.send({"pause": told})
        except (Disconnected, ValueError, OSError):
            return  # the rank is gone, or `end` has closed the connection: the commands' side tells

    def ask_to_exit(self) -> None:
        """Tell the rank to leave."""
        try:
            self.connection.send({"do": "exit"})
        except Disconnected:
            self.kill()

    def kill(self) -> None:
        """End the rank: it does so itself when its connection breaks, even from within a hung collective."""
        for connection in (self.connection, self.board):
            try:
                connection.socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it is broken already

    def end(self, patience: float = 1.0) -> None:
        """Wait for the rank to leave, then close what the host holds."""
        deadline = time.monotonic() + patience
        try:
            while (left := deadline - time.monotonic()) > 0:
                if select.select([self.connection], [], [], left)[0]:
                    self.connection.receive()  # the answer to "exit", then the end of the stream
        except (Disconnected, ValueError, OSError):
            pass  # that it is gone is what was waited for
        self.kill()
        self.relay.join(1.0)
        self.connection.close()
        self.board.close()

    def epitaph(self) -> str:
        """What can be said of how it ended."""
        return f"its connection from {self.where} broke; torchrun's output there tells more"


def accept_ranks(config: EngineConfig, board: ProgressBoard, program: str) -> list[RemoteRank]:
    """Wait at `config.listen` for every rank of `program`; RankTimeout names those that have not come."""
    secret = key()
    try:
        listener = socket.create_server(address_of(config.listen), backlog=config.tp * 2)
    except OSError as error:
        raise ConfigError(f"cannot listen at {config.listen}: {error}") from error
    joined: dict[tuple[int, Role], Connection[dict[str, Any]]] = {}
    deadline = time.monotonic() + JOIN_SECONDS
    try:
        with listener:
            listener.settimeout(_LOOK_SECONDS)
            while len(joined) < 2 * config.tp:
                if time.monotonic() > deadline:
                    raise RankTimeout(_absent(config, joined, program))
                _accept(listener, config, secret, joined)
                _forget_the_gone(joined)
    except BaseException:
        _close(joined)
        raise
    ranks = []
    for rank in range(config.tp):
        commands = joined[rank, "commands"]
        where = str(commands.socket.getpeername()[0])
        commands.socket.settimeout(
            config.timeout_seconds
        )  # a rank that stops within a message must not stop its host
        ranks.append(RemoteRank(rank, commands, joined[rank, "board"], where))
        ranks[-1].watch(board)
    return ranks


def _accept(
    listener: socket.socket,
    config: EngineConfig,
    secret: bytes,
    joined: dict[tuple[int, Role], Connection[dict[str, Any]]],
) -> None:
    """Take one connection in, or turn it away: a stranger must not stop the ranks from joining."""
    try:
        sock, _ = listener.accept()
    except TimeoutError:
        return
    connection = Connection(sock, MAPS)
    try:
        who = admit(connection, secret)
        _check(who, config, joined, connection)
        connection.send({"ok": True, **_about(config)})
    except (Disconnected, ValueError, KeyError, TypeError):
        connection.close()
        return
    tune(sock)
    joined[who.rank, who.role] = connection


def _check(
    who: Joining,
    config: EngineConfig,
    joined: dict[tuple[int, Role], Connection[dict[str, Any]]],
    connection: Connection[dict[str, Any]],
) -> None:
    if who.size != config.tp:
        refuse(connection, f"torchrun has started {who.size} ranks, but the host was given --tp {config.tp}")
    if not 0 <= who.rank < config.tp:
        refuse(connection, f"there is no rank {who.rank} at --tp {config.tp}")
    if (who.rank, who.role) in joined:
        refuse(connection, f"rank {who.rank} has joined already")


def _forget_the_gone(joined: dict[tuple[int, Role], Connection[dict[str, Any]]]) -> None:
    """A rank that ended while others are awaited may be started again and join anew."""
    for at, connection in list(joined.items()):
        if select.select([connection], [], [], 0)[0] and _at_its_end(connection):
            joined.pop(at).close()


def _at_its_end(connection: Connection[dict[str, Any]]) -> bool:
    try:
        return not connection.socket.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _absent(
    config: EngineConfig, joined: dict[tuple[int, Role], Connection[dict[str, Any]]], program: str
) -> str:
    missing = [str(rank) for rank in range(config.tp) if (rank, "board") not in joined]
    return (
        f"rank {', '.join(missing)} did not come to {config.listen} within {JOIN_SECONDS:g} s: start them with "
        f"torchrun … -m {program} {config.listen}"
    )


def _about(config: EngineConfig) -> dict[str, Any]:
    return {"device": config.device, "timeout": config.timeout_seconds, "threads": config.threads or 0}


def _close(joined: dict[tuple[int, Role], Connection[dict[str, Any]]]) -> None:
    for connection in joined.values():
        connection.close()
