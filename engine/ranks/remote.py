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

from engine.config import EngineConfig
from engine.errors import ConfigError, RankTimeout
from engine.ranks.joining import (
    RELAY_SECONDS,
    STANDINGS,
    Applicant,
    PauseWish,
    Role,
    address_of,
    shared_key,
)
from engine.ranks.messages import Leave
from engine.ranks.progress import ProgressBoard, Standing
from engine.ranks.reports import ANSWERS, Answer
from engine.ranks.wire import Connection, Disconnected

#: Seconds for which the host waits for all ranks to come: somebody starts them by hand.
JOIN_SECONDS = 600.0
#: How often the host looks, while it waits, whether one that had come is gone again.
_LOOK_SECONDS = 0.5

Joined = dict[tuple[int, Role], socket.socket]


@dataclass(slots=True)
class RemoteRank:
    """One rank of torchrun's."""

    rank: int
    connection: Connection[Answer]
    line: Connection[Standing]
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
                readable, _, _ = select.select([self.line], [], [], RELAY_SECONDS)
                if readable:
                    at = self.line.receive()
                    board.write(self.rank, at.step, at.place, at.operations)
                if board.pause_wanted != told:
                    told = not told
                    self.line.send(PauseWish(told))
        except (Disconnected, ValueError, OSError):
            return  # the rank is gone, or `end` has closed the connection: the commands' side tells

    def ask_to_exit(self) -> None:
        """Tell the rank to leave."""
        try:
            self.connection.send(Leave())
        except Disconnected:
            self.kill()

    def kill(self) -> None:
        """End the rank: it does so itself when its connection breaks, even from within a hung collective."""
        for connection in (self.connection, self.line):
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
                    self.connection.receive()  # the answer to `Leave`, then the end of the stream
        except (Disconnected, ValueError, OSError):
            pass  # that it is gone is what was waited for
        self.kill()
        self.relay.join(1.0)
        self.connection.close()
        self.line.close()

    def epitaph(self) -> str:
        """What can be said of how it ended."""
        return f"its connection from {self.where} broke; torchrun's output there tells more"


def accept_ranks(config: EngineConfig, board: ProgressBoard, command: str) -> list[RemoteRank]:
    """Wait at `config.listen` for every rank; RankTimeout names those that have not come, and that torchrun is to be
    told `command`."""
    key = shared_key()
    try:
        listener = socket.create_server(address_of(config.listen), backlog=config.tp * 2)
    except OSError as error:
        raise ConfigError(f"cannot listen at {config.listen}: {error}") from error
    joined: Joined = {}
    deadline = time.monotonic() + JOIN_SECONDS
    try:
        with listener:
            listener.settimeout(_LOOK_SECONDS)
            while len(joined) < 2 * config.tp:
                if time.monotonic() > deadline:
                    raise RankTimeout(_absent(config, joined, command))
                _accept(listener, config, key, joined)
                _forget_the_gone(joined)
    except BaseException:
        for sock in joined.values():
            sock.close()
        raise
    ranks = []
    for rank in range(config.tp):
        commands, line = joined[rank, Role.COMMANDS], joined[rank, Role.BOARD]
        where = str(commands.getpeername()[0])
        commands.settimeout(
            config.timeout_seconds
        )  # a rank that stops within a message must not stop its host
        ranks.append(RemoteRank(rank, Connection(commands, ANSWERS), Connection(line, STANDINGS), where))
        ranks[-1].watch(board)
    return ranks


def _accept(listener: socket.socket, config: EngineConfig, key: bytes, joined: Joined) -> None:
    """Take one connection in, or turn it away: a stranger must not stop the ranks from joining."""
    try:
        sock, _ = listener.accept()
    except TimeoutError:
        return
    try:
        applicant = Applicant(sock, key)
        _check(applicant, config, joined)
        applicant.admit(config.device, config.timeout_seconds, config.threads or 0)
    except Disconnected:
        sock.close()
        return
    joined[applicant.request.rank, applicant.request.role] = sock


def _check(applicant: Applicant, config: EngineConfig, joined: Joined) -> None:
    who = applicant.request
    if who.size != config.tp:
        applicant.refuse(f"torchrun has started {who.size} ranks, but the host was given --tp {config.tp}")
    if not 0 <= who.rank < config.tp:
        applicant.refuse(f"there is no rank {who.rank} at --tp {config.tp}")
    if (who.rank, who.role) in joined:
        applicant.refuse(f"rank {who.rank} has joined already")


def _forget_the_gone(joined: Joined) -> None:
    """A rank that ended while others are awaited may be started again and join anew."""
    for at, sock in list(joined.items()):
        if select.select([sock], [], [], 0)[0] and _at_its_end(sock):
            joined.pop(at).close()


def _at_its_end(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _absent(config: EngineConfig, joined: Joined, command: str) -> str:
    missing = [str(rank) for rank in range(config.tp) if (rank, Role.BOARD) not in joined]
    return (
        f"rank {', '.join(missing)} did not come to {config.listen} within {JOIN_SECONDS:g} s: start them with "
        f"torchrun … {command} {config.listen}"
    )
