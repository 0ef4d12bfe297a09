"""The host's side of an engine: starts the ranks, commands them together, notices when one is lost.

Torch-free: the process that holds a `Client` stays light. Every command goes to every rank and is over
when all have answered; a rank that raised, died, hung or fell out of step is reported by name with the
operation at which each rank stands, and the engine is then ended: ranks are never resumed apart.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from engine.config import EngineConfig
from engine.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    RankError,
    RankTimeout,
    RequestError,
)
from engine.ranks.processes import RankProcess, start_ranks
from engine.ranks.progress import ProgressBoard
from engine.ranks.remote import RemoteRank, accept_ranks
from engine.ranks.wire import Disconnected
from engine.taps.names import TapSpec

Answer = dict[str, Any]
Rank = RankProcess | RemoteRank

#: How long the other ranks have to answer as well once one has failed.
_GRACE_SECONDS = 1.0

_ERRORS: dict[str, type[EngineError]] = {
    error.__name__: error for error in (CheckpointError, ConfigError, RequestError)
}


class Client:
    """A running engine: starts the ranks of `program`, or awaits those of torchrun at `config.listen`.
    Use as a context manager: leaving it ends every rank."""

    def __init__(self, config: EngineConfig, specs: Sequence[TapSpec] = (), *, program: str) -> None:
        self.config = config
        self.specs = specs
        self.board = ProgressBoard.create(config.tp)
        self._ranks: list[Rank] = []
        self._selector = selectors.DefaultSelector()
        try:
            if config.listen:
                self._ranks += accept_ranks(config, self.board, program)
            else:
                self._ranks += start_ranks(config, self.board, program)
            for rank in self._ranks:
                self._selector.register(rank.connection, selectors.EVENT_READ, rank)
            hellos = self.collect(config.timeout_seconds)
        except BaseException:
            self.close(patience=0)
            raise
        self.backend = str(hellos[0]["backend"])
        self.pids = [int(hello["pid"]) for hello in hellos]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the engine can still be commanded."""
        return bool(self._ranks)

    def load(self, path: Path, rules: Mapping[str, str] | None = None) -> list[Answer]:
        """Load a checkpoint on every rank; answers tell bytes read and peak memory."""
        return self.call("load", path=str(path), config=asdict(self.config), rules=dict(rules or {}))

    def call(self, do: str, *, timeout: float | None = 0, **arguments: Any) -> list[Answer]:
        """Send one command to all ranks and return their answers in rank order.

        `timeout`: seconds without any progress, None for no limit, 0 for the configured one.
        """
        self.send(do, **arguments)
        return self.collect(self.config.timeout_seconds if timeout == 0 else timeout)

    def send(self, do: str, **arguments: Any) -> None:
        """Send one command to all ranks without waiting."""
        if not self._ranks:
            raise RankError("the engine has ended: restart it")
        message = {"do": do, **arguments}
        for rank in self._ranks:
            try:
                rank.connection.send(message)
            except Disconnected:
                self._lost([rank])

    def collect(self, timeout: float | None, poll: Callable[[], None] | None = None) -> list[Answer]:
        """One answer of every rank. `poll` is called some ten times a second while waiting (to interrupt).

        RankTimeout when for `timeout` seconds no rank has answered or entered an operation: a long pass
        that moves on is not hung, and ranks that wait for a hung one in a collective do not move on.
        """
        answers: dict[int, Answer] = {}
        progress, since = -1, time.monotonic()
        while len(answers) < len(self._ranks):
            if lost := self._receive(answers, 0.1):
                self._lost(lost)
            if any(not answer["ok"] for answer in answers.values()):
                self._failed(answers)
            if poll is not None:
                poll()
            moved, now = len(answers) + sum(self._standing_operations()), time.monotonic()
            if moved != progress:
                progress, since = moved, now
            elif timeout is not None and now - since > timeout:
                self._hung(answers, timeout)
        return [answers[rank] for rank in range(len(self._ranks))]

    def interrupt(self) -> None:
        """Ask all ranks to pause, at the same operation: within a layer when the pass under way was begun
        with a pause specification, which is what makes the taps stop."""
        if not self.board.closed:
            self.board.ask_to_pause(True)

    def clear_interrupt(self) -> None:
        """Let ranks run again."""
        if not self.board.closed:
            self.board.ask_to_pause(False)

    def standing(self) -> list[str]:
        """Where each rank stands, in words."""
        words = []
        for rank in range(self.config.tp):
            at = self.board.read(rank)
            known = at.operations > 0 and at.place < len(self.specs)
            place = self.specs[at.place].name if known else "before the first operation"
            words.append(f"rank {rank} at {place}, step {at.step} (operation {at.operations})")
        return words

    def close(self, patience: float = 1.0) -> None:
        """End every rank and leave nothing behind; after `patience` seconds by force. Safe to call again."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            if patience:
                rank.ask_to_exit()
            else:
                rank.kill()
        deadline = time.monotonic() + patience
        for rank in ranks:
            rank.end(max(0.0, deadline - time.monotonic()))
        self._selector.close()
        if not self.board.closed:
            self.board.close()

    def _receive(self, answers: dict[int, Answer], seconds: float) -> list[Rank]:
        """Put the answers that come within so many seconds into `answers`; returns the ranks that are gone."""
        gone = []
        for key, _ in self._selector.select(seconds):
            rank: Rank = key.data
            try:
                answers[rank.rank] = rank.connection.receive()
            except Disconnected:
                gone.append(rank)
        return gone

    def _standing_operations(self) -> list[int]:
        return [self.board.read(rank).operations for rank in range(self.config.tp)]

    def _failed(self, answers: dict[int, Answer]) -> NoReturn:
        """At least one rank answered with an error: the user's mistake is raised as such when all ranks
        agree (they are still in step); anything else ends the engine."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while len(answers) < len(self._ranks) and time.monotonic() < deadline:
            if gone := self._receive(answers, 0.1):
                self._lost(gone)  # what the others say of it is a consequence: the connection to it broke
        failed = {rank: answer for rank, answer in answers.items() if not answer["ok"]}
        first, error = min(failed.items())
        kind = _ERRORS.get(error["kind"], EngineError)
        expected = all(answer["expected"] for answer in failed.values())
        if expected and len(failed) == len(self._ranks):
            raise kind(error["message"])
        where = "; ".join(self.standing())
        names = ", ".join(str(rank) for rank in sorted(failed))
        self.close(patience=0)
        if expected:  # the ranks are no longer in step, but the message says what the user can do
            raise kind(f"{error['message']} (on rank {names} alone: the engine was ended)")
        lost = RankError(f"rank {names} raised {error['kind']}: {error['message']} ({where})")
        lost.add_note(f"rank {first}:\n{error['traceback']}")
        raise lost

    def _lost(self, gone: list[Rank]) -> NoReturn:
        where = "; ".join(self.standing())
        how = "; ".join(f"rank {rank.rank} is lost: {rank.epitaph()}" for rank in gone)
        self.close(patience=0)
        raise RankError(f"{how} ({where}); every rank was ended")

    def _hung(self, answers: dict[int, Answer], timeout: float) -> NoReturn:
        silent = [str(rank.rank) for rank in self._ranks if rank.rank not in answers]
        where = "; ".join(self.standing())
        self.close(patience=0)
        raise RankTimeout(f"no answer from rank {', '.join(silent)} within {timeout:g} s ({where})")
