"""Awaiting the ranks that torchrun starts (torch-free).

All who connect are heard side by side, each for `HANDSHAKE_SECONDS` at most: nobody who is silent keeps the ranks out.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable

from lockstep.engine.config import EngineConfig
from lockstep.engine.errors import ConfigError, RankTimeout
from lockstep.engine.ranks.joining import (
    KEY_VARIABLE,
    STANDINGS,
    Admission,
    Applicant,
    Member,
    Refusal,
    Role,
    address_of,
    shared_secret,
)
from lockstep.engine.ranks.progress import ProgressBoard
from lockstep.engine.ranks.remote import RemoteRank
from lockstep.engine.ranks.reports import ANSWERS
from lockstep.engine.ranks.wire import Connection, Disconnected

#: Seconds for which the host waits for all ranks to come: somebody starts them by hand.
JOIN_SECONDS = 600.0
#: Connections that may be in the middle of the handshake, beside those of the ranks; beyond it the oldest goes.
MOST_STRANGERS = 64
#: How often the host looks, while it waits, for the overdue, and whether one that had come is gone again.
_LOOK_SECONDS = 0.5


def accept_ranks(
    config: EngineConfig, board: ProgressBoard, command: str, on_warning: Callable[[str], None]
) -> list[RemoteRank]:
    """Wait at `config.listen` for every rank; RankTimeout names those that have not come, and that torchrun is to be
    given `command`."""
    secret = shared_secret()
    address = address_of(config.listen)
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        listener = socket.create_server(address, family=family, backlog=config.tp * 2 + MOST_STRANGERS)
    except OSError as error:
        raise ConfigError(f"cannot listen at {config.listen}: {error}") from error
    with listener, selectors.DefaultSelector() as selector:
        reception = _Reception(config, secret, listener, selector, on_warning)
        try:
            reception.wait(command)
        except BaseException:
            for member in reception.joined.values():
                member.socket.close()
            raise
        finally:
            reception.close()
    return [_watched(rank, config, reception.joined, board) for rank in range(config.tp)]


def _watched(
    rank: int, config: EngineConfig, joined: dict[tuple[int, Role], Member], board: ProgressBoard
) -> RemoteRank:
    commands, line = joined[rank, Role.COMMANDS], joined[rank, Role.BOARD]
    # A rank that stops within a message must not stop its host.
    commands.socket.settimeout(config.timeout_seconds)
    remote = RemoteRank(
        rank,
        Connection(commands.socket, ANSWERS, seals=commands.seals),
        Connection(line.socket, STANDINGS, seals=line.seals),
        str(commands.socket.getpeername()[0]),
    )
    remote.watch(board)
    return remote


class _Reception:
    """Who has connected: applicants, oldest first; members that have joined; strangers, counted."""

    def __init__(
        self,
        config: EngineConfig,
        secret: bytes,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        on_warning: Callable[[str], None],
    ) -> None:
        self.config, self.secret, self.listener, self.on_warning = config, secret, listener, on_warning
        self.joined: dict[tuple[int, Role], Member] = {}
        self.strangers = 0
        self._applicants: dict[socket.socket, Applicant] = {}
        self._selector = selector
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)

    def wait(self, command: str) -> None:
        """Until every rank has joined with both its connections."""
        deadline = time.monotonic() + JOIN_SECONDS
        while len(self.joined) < 2 * self.config.tp:
            if time.monotonic() > deadline:
                raise RankTimeout(self._absent(command))
            for key, _ in self._selector.select(_LOOK_SECONDS):
                if key.fileobj is self.listener:
                    self._accept()
                elif key.fileobj in self._applicants:  # not dropped by what came before it in this round
                    self._hear(key.data)
            self._forget_the_overdue()
            self._forget_the_gone()
        if self.strangers > 1:
            self.on_warning(f"{self.strangers} connections to {self.config.listen} did not prove the secret")

    def close(self) -> None:
        """Close what has not joined."""
        for sock in self._applicants:
            sock.close()

    def _accept(self) -> None:
        try:
            sock, address = self.listener.accept()
        except OSError:
            return  # it is gone again
        try:
            applicant = Applicant(sock, self.secret, address[0])
        except OSError:  # gone as well
            sock.close()
            return
        self._applicants[sock] = applicant
        self._selector.register(sock, selectors.EVENT_READ, applicant)
        if len(self._applicants) > MOST_STRANGERS + 2 * self.config.tp:
            self._turn_away(next(iter(self._applicants.values())))

    def _hear(self, applicant: Applicant) -> None:
        try:
            member = applicant.hear()
        except Disconnected:
            self._turn_away(applicant)
            return
        if member is None:
            return
        self._release(applicant.socket)
        wrong = self._objection(member)
        config = self.config
        try:
            member.answer(
                Refusal(wrong)
                if wrong
                else Admission(config.device, config.timeout_seconds, config.threads or 0)
            )
        except Disconnected:
            wrong = "it is gone"
        if wrong:
            member.socket.close()
        else:
            self.joined[member.rank, member.role] = member

    def _objection(self, member: Member) -> str:
        """Why a rank that holds the secret may not join; "" where it may."""
        tp = self.config.tp
        if member.size != tp:
            return f"torchrun has started {member.size} ranks, but the host was given --tp {tp}"
        if member.rank >= tp:
            return f"there is no rank {member.rank} at --tp {tp}"
        if (member.rank, member.role) in self.joined:
            return f"rank {member.rank} has joined already"
        return ""

    def _release(self, sock: socket.socket) -> None:
        if self._applicants.pop(sock, None) is not None:
            self._selector.unregister(sock)

    def _turn_away(self, applicant: Applicant) -> None:
        """Close a stranger's connection; the first is reported, the others are counted."""
        self.strangers += 1
        if self.strangers == 1:
            self.on_warning(
                f"somebody connected to {self.config.listen} from {applicant.where} and did not prove the secret; if "
                f"that was a rank, set {KEY_VARIABLE} alike on both sides"
            )
        self._release(applicant.socket)
        applicant.socket.close()

    def _forget_the_overdue(self) -> None:
        now = time.monotonic()
        for applicant in list(self._applicants.values()):
            if applicant.deadline <= now:
                self._turn_away(applicant)

    def _forget_the_gone(self) -> None:
        """A rank that ended while others are awaited may be started again and join anew. Its connection for commands
        shows this, over which it sends nothing yet."""
        for (rank, role), member in list(self.joined.items()):
            if role == Role.COMMANDS and _at_its_end(member.socket):
                for each in Role:
                    if gone := self.joined.pop((rank, each), None):
                        gone.socket.close()

    def _absent(self, command: str) -> str:
        missing = [str(rank) for rank in range(self.config.tp) if (rank, Role.BOARD) not in self.joined]
        strangers = f"; {self.strangers} connections did not prove the secret" if self.strangers else ""
        return (
            f"rank {', '.join(missing)} did not come to {self.config.listen} within {JOIN_SECONDS:g} s: start them "
            f"with torchrun … {command} {self.config.listen}{strangers}"
        )


def _at_its_end(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
