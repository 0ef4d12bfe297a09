"""Ranks that are started before their host knows what they are to be: they import torch, most of the wait for a first
token, while the host reads its command line and the checkpoint. Torch-free, and light: it is what a host imports
first."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from lockstep.engine.children import start_python

#: Bytes of a rank's description at most.
_MOST = 1 << 16
#: Descriptors that come with it.
_DESCRIPTORS = 3
#: Begins the argument of a rank that stands by; the number of its socket follows.
MARK = "@"


@dataclass(slots=True)
class Standby:
    """Such a rank as its host sees it: what it was started with, and the line on which it hears what it is."""

    program: str
    threads: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    line: socket.socket

    def become(self, spec: bytes, descriptors: Sequence[int]) -> bool:
        """Give it its description, and what it would have inherited; False where it has ended already."""
        try:
            socket.send_fds(self.line, [spec], descriptors)
        except OSError:
            self.dismiss()
            return False
        self.line.close()
        return True

    def dismiss(self) -> None:
        """End it: nobody has use for it."""
        self.line.close()
        self.process.kill()
        self.process.wait()
        self.output.close()


_standing: list[Standby] = []


@contextmanager
def standing_by(program: str, threads: int, ranks: int = 1) -> Iterator[None]:
    """Within the block so many ranks of `python -m program` stand by, for an engine whose ranks have so many threads.
    Where no process can be started now, none does: the engine reports it when it starts its own."""
    try:
        for _ in range(ranks):
            _stand_by(program, threads)
        yield
    finally:
        while _standing:
            _standing.pop().dismiss()


def _stand_by(program: str, threads: int) -> None:
    ours, theirs = socket.socketpair()
    output = tempfile.TemporaryFile(prefix="lockstep-rank-")  # noqa: SIM115 - lives as long as the rank
    try:
        process = start_python(
            "-m", program, f"{MARK}{theirs.fileno()}", settings=rank_settings(threads),
            stdout=output, stderr=output, pass_fds=(theirs.fileno(),), process_group=0,
        )  # fmt: skip
        _standing.append(Standby(program, threads, process, output, ours))
    except OSError:
        ours.close()
        output.close()
    finally:
        theirs.close()


def rank_settings(threads: int) -> dict[str, str]:
    """The environment's variables of a rank."""
    return {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}


def take(program: str, threads: int) -> Standby | None:
    """One that stands by, if it was started as this one would be."""
    if _standing and (_standing[0].program, _standing[0].threads) == (program, threads):
        return _standing.pop()
    return None


def description(argument: str) -> tuple[bytes, list[int]]:
    """In the rank: what it is, and its descriptors, once its host has said so. EOFError when that is gone."""
    with socket.socket(fileno=int(argument.removeprefix(MARK))) as line:
        spec, descriptors, _, _ = socket.recv_fds(line, _MOST, _DESCRIPTORS)
    if len(descriptors) != _DESCRIPTORS:
        for one in descriptors:
            os.close(one)
        raise EOFError("its host is gone")
    return spec, descriptors
