"""One rank as a process: loads its shards, then serves the host's commands until told to stop.

`serve` is called by a rank program, which says how rule names become `Rules`: `engine.ranks` knows only
the correct rules, `engine.faults.rank` the whole catalogue. Every command is answered with a result or
with the error and its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine.errors import EngineError
from engine.parallel.comm import Comm
from engine.parallel.devices import rank_device
from engine.ranks.commands import Commands
from engine.ranks.environment import Post, take_post
from engine.ranks.wire import Connection, Disconnected, failure
from engine.rules import Rules

Resolve = Callable[[Mapping[str, str]], Rules]

#: Ranks wait longer for each other than the host for them, so that the host is the one to judge who hangs.
_COLLECTIVE_PATIENCE = 10


def serve(resolve: Resolve) -> None:
    """Run one rank to its end. Its post is this program's only argument."""
    if len(sys.argv) != 2:
        sys.exit("a rank is started by its host, or by torchrun with the host's address as its argument")
    try:
        post = take_post(sys.argv[1])
    except (EngineError, Disconnected) as error:
        sys.exit(f"lockstep rank: {error}")
    torch.set_num_threads(post.threads)
    try:
        comm = _meet(post)
        commands = Commands(comm, resolve, post.host)
        post.host.send({"ok": True, "pid": os.getpid(), "backend": comm.backend})
        while _answer(post.host, commands):
            pass
        comm.leave()
        os._exit(0)  # taking torch down tidily takes a second and gives back nothing that ending does not
    except Disconnected:
        os._exit(1)  # no host: nobody is left to tell
    except Exception as error:
        _report(post.host, error)
        _stay(post.host)
        os._exit(1)


def _meet(post: Post) -> Comm:
    return Comm.join(
        post.rank,
        post.size,
        local_size=post.local_size,
        device=rank_device(post.device, post.local_rank, post.local_size),
        store_path=None if post.store is None else str(post.store),
        timeout=_COLLECTIVE_PATIENCE * post.timeout,
        board=post.board,
    )


def _stay(host: Connection[dict[str, Any]]) -> None:
    """Wait for the host to have heard: a rank that left at once would be taken for lost, its error with it."""
    try:
        while host.receive()["do"] != "exit":
            pass
    except Disconnected:
        return


def _answer(host: Connection[dict[str, Any]], commands: Commands) -> bool:
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


def _report(host: Connection[dict[str, Any]], error: Exception) -> None:
    try:
        host.send(failure(error))
    except Disconnected:
        os._exit(1)
