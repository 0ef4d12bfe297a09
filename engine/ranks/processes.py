"""Starting and ending rank processes (torch-free).

A rank inherits three descriptors and nothing else: its socket, the progress board, and a lifeline, so that no rank
outlives its host.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from lockstep.engine.children import start_python
from lockstep.engine.config import EngineConfig
from lockstep.engine.extras import need
from lockstep.engine.lifeline import Lifeline
from lockstep.engine.machine import MemoryBefore, default_threads
from lockstep.engine.ranks import standby
from lockstep.engine.ranks.environment import RankSpec
from lockstep.engine.ranks.messages import Leave
from lockstep.engine.ranks.progress import ProgressBoard
from lockstep.engine.ranks.reports import ANSWERS, Answer
from lockstep.engine.ranks.vitals import Vitals, vitals_of
from lockstep.engine.ranks.wire import Connection, Disconnected
from lockstep.engine.scratch import ScratchFolder

#: Bytes of a dead rank's last words that are worth repeating.
_LAST_WORDS = 2000


@dataclass(slots=True)
class RankProcess:
    """One rank as its host sees it."""

    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection[Answer]
    lifeline: Lifeline
    output: IO[bytes]
    before: MemoryBefore
    meeting: ScratchFolder | None = None  # where the ranks meet, held by one of them for all

    def vitals(self) -> Vitals:
        """How its process is."""
        return vitals_of(self.process.pid)

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()

    def ask_to_exit(self) -> None:
        """Ask the rank to leave; one that is gone or busy will be ended anyway."""
        try:
            self.connection.send(Leave())
        except Disconnected:
            self.kill()

    def end(self, patience: float = 1.0) -> None:
        """Wait for the process to be gone, by force if need be, and release what the host holds."""
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.connection.close()
        self.lifeline.close()
        self.output.close()
        if self.meeting is not None:
            self.meeting.close()

    def epitaph(self) -> str:
        """How the process ended and what it printed last."""
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"its connection broke or stalled, and {self.vitals().describe()}"
        if code == -signal.SIGKILL:
            how = self.before.killed()
        else:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, self.output.tell() - _LAST_WORDS))
        words = self.output.read().decode("utf-8", "replace").strip()
        return f"{how}; it printed last: {words.splitlines()[-1]}" if words else how


def start_ranks(config: EngineConfig, board: ProgressBoard, program: str) -> list[RankProcess]:
    """Start `tp` processes of `python -m program`; all meet through one rendezvous file."""
    need("engine", "running a model")
    meeting, before = ScratchFolder.make("store", small=True), MemoryBefore.now()
    ranks: list[RankProcess] = []
    try:
        for rank in range(config.tp):
            ranks.append(_start(rank, config, board, program, meeting.path / "store", before))
    except BaseException:
        for started in ranks:
            started.kill()
            started.end()
        meeting.close()
        raise
    ranks[0].meeting = meeting
    return ranks


def _start(
    rank: int, config: EngineConfig, board: ProgressBoard, program: str, store: Path, before: MemoryBefore
) -> RankProcess:
    ours, theirs = socket.socketpair()
    ours.settimeout(config.timeout_seconds)  # a rank that stops within a message must not stop its host
    lifeline = Lifeline()
    threads = config.threads or default_threads(config.tp)
    spec = RankSpec(
        rank=rank, size=config.tp, device=config.device, store=str(store),
        threads=threads, socket_fd=theirs.fileno(), board_fd=board.fd, lifeline_fd=lifeline.fd,
    )  # fmt: skip
    try:
        process, output = _process(spec, program)
    finally:
        theirs.close()
        lifeline.handed_over()
    return RankProcess(rank, process, Connection(ours, ANSWERS), lifeline, output, before)


def _process(spec: RankSpec, program: str) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """The process of a rank, and what it prints: one that stands by, else a new one."""
    described, given = msgspec.json.encode(spec), (spec.socket_fd, spec.board_fd, spec.lifeline_fd)
    waiting = standby.take(program, spec.threads)
    if waiting is not None and waiting.become(described, given):
        return waiting.process, waiting.output
    output = tempfile.TemporaryFile(prefix="lockstep-rank-")  # noqa: SIM115 - lives as long as the rank
    process = start_python(
        "-m", program, described.decode(), settings=standby.rank_settings(spec.threads),
        stdout=output, stderr=output, pass_fds=given,
        process_group=0,  # ctrl+c is the host's to handle; of the host's session, as schedulers count by session
    )  # fmt: skip
    return process, output
