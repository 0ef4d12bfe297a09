"""What a rank process is given: who it is, its connection to the host, the board on which it reports its progress.

A rank that the host started inherits all three. One that torchrun started knows its number from torchrun's
environment, connects to the host over TCP, and keeps a board of its own, which a thread carries to the host.
Either way the rank ends when its host does, even from within a hung collective. Torch-free.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import msgspec

from lockstep.engine.errors import ConfigError
from lockstep.engine.lifeline import end_with_starter
from lockstep.engine.machine import default_threads
from lockstep.engine.ranks.joining import (
    PAUSES,
    RELAY_SECONDS,
    SIGN_OF_LIFE_SECONDS,
    PauseWish,
    Role,
    Standing,
    address_of,
    join,
    shared_secret,
)
from lockstep.engine.ranks.messages import COMMANDS, Command
from lockstep.engine.ranks.progress import ProgressBoard
from lockstep.engine.ranks.standby import MARK, description
from lockstep.engine.ranks.wire import Connection, Disconnected
from lockstep.engine.scratch import remove_once_left


class RankExit(IntEnum):
    """How a rank's process ends, in the program's own codes; 0: it was asked to leave."""

    USAGE = 2
    FAILED = 3  # it could not start; the host knows why
    LOST = 5  # its host is gone


class RankSpec(msgspec.Struct, frozen=True):
    """What a host gives a rank that it starts: the program's only argument, as JSON. Descriptors are inherited."""

    rank: int
    size: int
    device: str
    store: str  # the file where the ranks meet
    threads: int
    socket_fd: int
    board_fd: int
    lifeline_fd: int


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """What a rank is given. `store`: the rendezvous file, None under torchrun."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: str
    threads: int
    host: Connection[Command]
    board: ProgressBoard
    store: str | None


def rank_environment(argument: str) -> RankEnvironment:
    """From a rank program's only argument: a `RankSpec`, what it comes by later, or HOST:PORT under torchrun."""
    if argument.startswith(MARK):
        return _inherited(_awaited(argument))
    if argument.startswith("{"):
        return _inherited(msgspec.json.decode(argument, type=RankSpec))
    return _joined(argument)


def _awaited(argument: str) -> RankSpec:
    """What a rank that stands by is told, with its own numbers of the descriptors."""
    try:
        described, (host, board, lifeline) = description(argument)
    except EOFError:
        sys.exit(RankExit.LOST)
    spec = msgspec.json.decode(described, type=RankSpec)
    return msgspec.structs.replace(spec, socket_fd=host, board_fd=board, lifeline_fd=lifeline)


def _inherited(spec: RankSpec) -> RankEnvironment:
    # What the host would have removed goes with the ranks.
    end_with_starter(spec.lifeline_fd, lambda: remove_once_left(Path(spec.store).parent))
    return RankEnvironment(
        rank=spec.rank, size=spec.size, local_rank=spec.rank, local_size=spec.size, device=spec.device,
        threads=spec.threads,
        host=Connection(socket.socket(fileno=spec.socket_fd), COMMANDS),
        board=ProgressBoard(spec.board_fd, spec.size), store=spec.store,
    )  # fmt: skip


def _joined(argument: str) -> RankEnvironment:
    try:
        rank, size, local_rank, local_size = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
    except KeyError as error:
        raise ConfigError(f"{error} is not set: start this program with torchrun") from None
    address, secret = address_of(argument), shared_secret()
    host, host_seals, reported = join(address, secret, rank, size, Role.COMMANDS)
    line, line_seals, _ = join(address, secret, rank, size, Role.BOARD)
    board = ProgressBoard.create(size)
    _in_background("board", lambda: _carry(Connection(line, PAUSES, seals=line_seals), board, rank))
    return RankEnvironment(
        rank=rank, size=size, local_rank=local_rank, local_size=local_size, device=reported.device,
        threads=reported.threads or default_threads(local_size),
        host=Connection(host, COMMANDS, seals=host_seals), board=board, store=None,
    )  # fmt: skip


def _carry(line: Connection[PauseWish], board: ProgressBoard, rank: int) -> None:
    """Report to the host where this rank stands, hear whether it is to pause; end with the host."""
    reported, last = b"", 0.0
    try:
        while True:
            if select.select([line], [], [], RELAY_SECONDS)[0]:
                board.ask_to_pause(line.receive().wanted)
            ring, now = board.ring(rank), time.monotonic()
            if ring != reported or now - last >= SIGN_OF_LIFE_SECONDS:
                line.send(Standing(ring, os.getpid(), time.process_time()))
                reported, last = ring, now
    except Disconnected as error:
        print(f"lockstep rank: rank {rank} has lost its host: {error}", file=sys.stderr, flush=True)
        os._exit(RankExit.LOST)


def _in_background(name: str, watch: Callable[[], None]) -> None:
    threading.Thread(target=watch, daemon=True, name=name).start()
