"""Ranks that torchrun has started, on this machine or on others, as their host sees them (torch-free).

Every rank has connected and proved itself (`engine.ranks.accepting`), and serves commands as any rank does. A thread
a rank carries its place to the host's progress board and the host's wish to pause back to it, so that a hung or dead
rank is reported just as a local one is. When the host closes a connection, or dies, or its machine is out of reach,
the rank at the other end ends itself.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from dataclasses import dataclass, field

from lockstep.engine.ranks.joining import RELAY_SECONDS, PauseWish, Standing
from lockstep.engine.ranks.messages import Leave
from lockstep.engine.ranks.progress import ProgressBoard
from lockstep.engine.ranks.reports import Answer
from lockstep.engine.ranks.vitals import Vitals
from lockstep.engine.ranks.wire import Connection, Disconnected

#: Seconds without a sign of life after which a rank is reported as silent.
SILENT_AFTER = 5.0


@dataclass(slots=True)
class RemoteRank:
    """One rank of torchrun's."""

    rank: int
    connection: Connection[Answer]
    line: Connection[Standing]
    where: str
    relay: threading.Thread = field(init=False)
    _broken: str = field(default="", init=False)  # why the board's connection is of no further use
    _last: Standing | None = field(default=None, init=False)
    _heard: float = field(default_factory=time.monotonic, init=False)

    def watch(self, board: ProgressBoard) -> None:
        """Start to carry news between this rank and the host's board."""
        self.relay = threading.Thread(
            target=self._carry, args=(board,), daemon=True, name=f"rank {self.rank}"
        )
        self.relay.start()

    def _carry(self, board: ProgressBoard) -> None:
        known = False
        try:
            while True:
                readable, _, _ = select.select([self.line], [], [], RELAY_SECONDS)
                if readable:
                    self._last, self._heard = self.line.receive(), time.monotonic()
                    board.put_ring(self.rank, self._last.ring)
                if board.pause_wanted != known:
                    known = not known
                    self.line.send(PauseWish(known))
        except (ValueError, OSError) as error:  # the rank is gone, or `end` has closed the connection
            self._broken = str(error)
            self.kill()  # a rank that cannot be watched is lost: the commands' side reports it

    def vitals(self) -> Vitals:
        """How its process is, by its own account."""
        known, silent = self._last, time.monotonic() - self._heard
        return Vitals(
            known.pid if known else 0,
            "",
            known.processor if known else 0.0,
            silent if silent > SILENT_AFTER else 0.0,
        )

    def ask_to_exit(self) -> None:
        """Ask the rank to leave."""
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
        """What can be stated of how it ended."""
        self.relay.join(1.0)  # the board's connection breaks for the same reason, perhaps a moment later
        why = f" ({self._broken})" if self._broken else ""
        return f"its connection from {self.where} broke{why}; torchrun's output there shows more"
