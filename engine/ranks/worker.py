"""One rank as a process: loads its shards, then serves the host's commands until asked to stop.

`serve` is called by a rank program, which defines how names of faults become `Rules`: `engine.ranks` knows only
the correct rules, `engine.faults.rank` the whole catalogue. Every command is answered with a result or
with the error and its traceback.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import torch

from lockstep.engine.errors import EngineError, panics_as_errors
from lockstep.engine.machine import keep_freed_pages
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.parallel.devices import rank_device
from lockstep.engine.parallel.operations import OpKind
from lockstep.engine.ranks.commands import Commands, Resolve
from lockstep.engine.ranks.environment import RankEnvironment, RankExit, rank_environment
from lockstep.engine.ranks.messages import Command, Leave
from lockstep.engine.ranks.reports import CommandFailure, Done, RankReady
from lockstep.engine.ranks.wire import Connection, Disconnected, MalformedMessage
from lockstep.engine.scratch import remove_once_left

#: Seconds that ranks wait for each other, a day: it is the host that judges who hangs, and they end with it.
_COLLECTIVE_SECONDS = 86_400.0


def serve(resolve: Resolve) -> NoReturn:
    """Run one rank to its end. This program's only argument is its description by the host, or the host's address
    under torchrun."""
    if len(sys.argv) != 2:
        _refused("a rank is started by its host, or by torchrun with the host's address as its argument")
    try:
        here = rank_environment(sys.argv[1])
    except EngineError as error:
        _refused(str(error))
    run(here, resolve)


def _refused(reason: str) -> NoReturn:
    print(f"lockstep rank: {reason}", file=sys.stderr, flush=True)
    sys.exit(RankExit.USAGE)


def run(here: RankEnvironment, resolve: Resolve) -> NoReturn:
    """Meet the other ranks, serve the host's commands, and end the process."""
    torch.set_num_threads(here.threads)
    keep_freed_pages()
    try:
        with panics_as_errors():
            _serve(here, resolve)
        os._exit(0)  # taking torch down tidily takes a second and gives back nothing that ending does not
    except MalformedMessage as error:
        print(f"lockstep rank: {error}", file=sys.stderr, flush=True)  # the host repeats a rank's last words
        os._exit(RankExit.LOST)
    except Disconnected:
        _end_without_host(here)
    except Exception as error:
        try:
            here.host.send(CommandFailure.of(error))
        except Disconnected:
            _end_without_host(here)
        _stay(here.host)
        os._exit(RankExit.FAILED)


def _serve(here: RankEnvironment, resolve: Resolve) -> None:
    comm = _meet(here)
    commands = Commands(comm, resolve, here.host)
    comm.note(OpKind.IDLE)
    here.host.send(RankReady(os.getpid(), comm.backend))
    while _answer(here.host, commands):
        pass
    comm.leave()


def _end_without_host(here: RankEnvironment) -> NoReturn:
    """Nobody is left to report to, nor to remove what the host had made for its ranks."""
    if here.store is not None:
        remove_once_left(Path(here.store).parent)
    os._exit(RankExit.LOST)


def _meet(here: RankEnvironment) -> Comm:
    return Comm.join(
        here.rank,
        here.size,
        local_size=here.local_size,
        device=rank_device(here.device, here.local_rank, here.local_size),
        store_path=here.store,
        timeout=_COLLECTIVE_SECONDS,
        board=here.board,
    )


def _stay(host: Connection[Command]) -> None:
    """Wait for the host to have heard: a rank that left at once would be taken for lost, its error with it."""
    try:
        while not isinstance(host.receive(), Leave):
            pass
    except Disconnected:
        return


def _answer(host: Connection[Command], commands: Commands) -> bool:
    """Serve one command; False when it was the last."""
    command = commands.receive()
    commands.comm.note(OpKind.COMMAND)
    if isinstance(command, Leave):
        host.send(Done())
        return False
    try:
        with panics_as_errors():
            answer = commands.perform(command)
        commands.comm.note(OpKind.ANSWER)
        host.send(answer)
        commands.comm.note(OpKind.IDLE)
    except Disconnected:
        raise
    except Exception as error:
        if isinstance(error, EngineError):  # after any other the rank stands where it was raised
            commands.comm.note(OpKind.IDLE)
        host.send(CommandFailure.of(error))
    return True
