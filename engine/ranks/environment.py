"""Where a rank finds itself: who it is, its line to the host, the board on which it says where it stands.

A rank that the host started inherits all three. One that torchrun started knows its number from torchrun's
environment, connects to the host over TCP, and keeps a board of its own, which a thread carries to the host.
Either way the rank ends when its host does, even from within a hung collective. Torch-free.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.ranks.joining import RELAY_SECONDS, Joining, address_of, join, key
from engine.ranks.progress import ProgressBoard
from engine.ranks.wire import MAPS, Connection, Disconnected


@dataclass(frozen=True, slots=True)
class Post:
    """`timeout`: the host's patience in seconds. `store`: the rendezvous file, None under torchrun."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: str
    timeout: float
    threads: int
    host: Connection[dict[str, Any]]
    board: ProgressBoard
    store: Path | None


def take_post(argument: str) -> Post:
    """From a rank program's only argument: the host's description (JSON), or HOST:PORT under torchrun."""
    return _inherited(argument) if argument.startswith("{") else _joined(argument)


def _inherited(argument: str) -> Post:
    spec = json.loads(argument)
    rank, size, store = int(spec["rank"]), int(spec["size"]), Path(spec["store"])

    def watch() -> None:
        os.read(spec["lifeline_fd"], 1)
        store.unlink(missing_ok=True)  # as the host would have
        os._exit(1)

    _in_background("lifeline", watch)
    return Post(
        rank=rank, size=size, local_rank=rank, local_size=size, device=spec["device"],
        timeout=spec["timeout"], threads=spec["threads"],
        host=Connection(socket.socket(fileno=spec["socket_fd"]), MAPS),
        board=ProgressBoard(spec["board_fd"], size), store=store,
    )  # fmt: skip


def _joined(argument: str) -> Post:
    try:
        rank, size, local_rank, local_size = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
    except KeyError as error:
        raise ConfigError(f"{error} is not set: start this program with torchrun") from None
    address, secret = address_of(argument), key()
    host, told = join(address, secret, Joining(rank, size, "commands"))
    line, _ = join(address, secret, Joining(rank, size, "board"))
    board = ProgressBoard.create(size)
    _in_background("board", lambda: _carry(line, board, rank))
    threads = int(told["threads"]) or max(1, (os.cpu_count() or 1) // local_size)
    return Post(
        rank=rank, size=size, local_rank=local_rank, local_size=local_size, device=str(told["device"]),
        timeout=float(told["timeout"]), threads=threads, host=host, board=board, store=None,
    )  # fmt: skip


def _carry(line: Connection[dict[str, Any]], board: ProgressBoard, rank: int) -> None:
    """Tell the host where this rank stands, hear whether it is to pause; end with the host."""
    told = board.read(rank)
    try:
        while True:
            if select.select([line], [], [], RELAY_SECONDS)[0]:
                board.ask_to_pause(bool(line.receive()["pause"]))
            at = board.read(rank)
            if at != told:
                line.send({"standing": [at.step, at.place, at.operations]})
                told = at
    except Disconnected:
        os._exit(1)


def _in_background(name: str, watch: Callable[[], None]) -> None:
    threading.Thread(target=watch, daemon=True, name=name).start()
