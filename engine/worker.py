"""One rank as a process: loads its shards, then serves the host's commands until told to stop.

`serve` is called by a rank program, which says how rule names become `Rules`: `engine.rank` knows only
the correct rules, `engine.faults.rank` the whole catalogue. Every command is answered with a result or
with the error and its traceback. When the host dies, the lifeline pipe ends and the rank with it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.comm import Comm
from engine.commands import Commands
from engine.errors import ConfigError
from engine.progress import ProgressBoard
from engine.rules import Rules
from engine.wire import Connection, Disconnected, failure

Resolve = Callable[[Mapping[str, str]], Rules]


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What the host tells a new rank on its command line (JSON): who it is and which descriptors are its own."""

    rank: int
    size: int
    device: str
    store: str
    timeout: float
    threads: int
    socket_fd: int
    board_fd: int
    lifeline_fd: int


def serve(resolve: Resolve) -> None:
    """Run one rank to its end."""
    spec = RankSpec(**json.loads(sys.argv[1]))
    _die_with_host(spec.lifeline_fd, Path(spec.store))
    torch.set_num_threads(spec.threads)
    board = ProgressBoard(spec.board_fd, spec.size)
    host = Connection(socket.socket(fileno=spec.socket_fd))
    try:
        comm = Comm.join(
            spec.rank,
            spec.size,
            device=_device(spec),
            store_path=spec.store,
            timeout=spec.timeout,
            board=board,
        )
        commands = Commands(comm, resolve, host)
        host.send({"ok": True, "pid": os.getpid(), "backend": comm.backend})
        while _answer(host, commands):
            pass
        comm.leave()
        os._exit(0)  # taking torch down tidily takes a second and gives back nothing that ending does not
    except Disconnected:
        os._exit(1)  # no host: nobody is left to tell
    except Exception as error:
        _report(host, error)
        _stay(host)
        os._exit(1)


def _stay(host: Connection) -> None:
    """Wait for the host to have heard: a rank that left at once would be taken for lost, its error with it."""
    try:
        while host.receive()["do"] != "exit":
            pass
    except Disconnected:
        return


def _device(spec: RankSpec) -> torch.device:
    """This rank's device; ranks share GPUs in turn when there are fewer of them. ConfigError where there is none."""
    kind, _, number = spec.device.partition(":")
    if kind != "cuda":
        return torch.device(spec.device)
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError(f"device {spec.device}: torch sees no GPU here; use the cpu")
    index = int(number) if number else spec.rank % count
    if index >= count:
        raise ConfigError(f"device {spec.device}: there are GPUs 0 to {count - 1}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _answer(host: Connection, commands: Commands) -> bool:
    """Serve one command; False when it was the last."""
    message = host.receive()
    if message["do"] == "exit":
        host.send({"ok": True})
        return False
    try:
        host.send({"ok": True, **commands.perform(message)})
    except Disconnected:
        raise
    except Exception as error:
        _report(host, error)
    return True


def _report(host: Connection, error: Exception) -> None:
    try:
        host.send(failure(error))
    except Disconnected:
        os._exit(1)


def _die_with_host(fd: int, store: Path) -> None:
    """End this process when the other end of the pipe closes, even from within a hung collective, and remove
    what the host would have removed."""

    def watch() -> None:
        os.read(fd, 1)
        store.unlink(missing_ok=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()
