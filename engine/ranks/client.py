"""The host's side of an engine: starts the ranks, commands them together, notices when one is lost.

Torch-free: the process that holds a `Client` stays light. Every command goes to every rank and is over
when all have answered; a rank that raised, died, hung or fell out of step is reported by name with the
operation at which each rank stands, and the engine is then ended: ranks are never resumed apart.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    RankError,
    RankTimeout,
    RequestError,
)
from lockstep.engine.ranks.accepting import accept_ranks
from lockstep.engine.ranks.hangs import (
    RankTrace,
    divergence_text,
    hang_text,
    history_texts,
    standing_text,
    stopped_text,
)
from lockstep.engine.ranks.messages import LoadModel, PutPatches, RankCommand, StagePatch, answers_of
from lockstep.engine.ranks.patience import Patience
from lockstep.engine.ranks.processes import RankProcess, start_ranks
from lockstep.engine.ranks.progress import ProgressBoard
from lockstep.engine.ranks.remote import RemoteRank
from lockstep.engine.ranks.reports import (
    Answer,
    CapturedTensor,
    CommandFailure,
    LoadReport,
    PauseReport,
    RankReady,
    StepAbandoned,
    StepReport,
)
from lockstep.engine.ranks.wire import Disconnected, MalformedMessage
from lockstep.engine.run.memory import report_bytes
from lockstep.engine.taps.names import TapSpec

A = TypeVar("A")
Rank = RankProcess | RemoteRank

#: After how many seconds a rank whose process is stopped is reported; the command goes on when it does.
STOPPED_SECONDS = 5.0
#: How long the other ranks have to answer as well once one has failed.
_GRACE_SECONDS = 1.0

_ERRORS: dict[str, type[EngineError]] = {
    error.__name__: error for error in (CheckpointError, ConfigError, RequestError)
}


class Client:
    """A running engine: starts ranks that run the module `program`, or awaits those of torchrun at `config.listen`
    (`command` is what torchrun is to be given, where that is not `-m program`). `on_warning` hears of strangers that
    try to join, and of a rank whose process is stopped.

    Use as a context manager: leaving it ends every rank.
    """

    def __init__(
        self,
        config: EngineConfig,
        specs: Sequence[TapSpec] = (),
        *,
        program: str,
        command: str = "",
        on_warning: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config = config
        self.specs = specs
        self._warn = on_warning
        self._taps = [spec.name for spec in specs]
        self.board = ProgressBoard.create(config.tp)
        self._ranks: list[Rank] = []
        self._passed: list[list[CapturedTensor]] = [
            [] for _ in range(config.tp)
        ]  # reported at pauses of this pass
        self._selector = selectors.DefaultSelector()
        try:
            if config.listen:
                self._ranks += accept_ranks(config, self.board, command or f"-m {program}", on_warning)
            else:
                self._ranks += start_ranks(config, self.board, program)
            for rank in self._ranks:
                self._selector.register(rank.connection, selectors.EVENT_READ, rank)
            ready = self._gather(RankReady, config.start_timeout_seconds)
        except BaseException:
            self.close(patience=0)
            raise
        self.backend = ready[0].backend
        self.pids = [one.pid for one in ready]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the engine can still be commanded."""
        return bool(self._ranks)

    def load(
        self, path: Path, rules: Mapping[str, str] | None = None, model: ModelConfig | None = None
    ) -> list[LoadReport]:
        """Load a checkpoint on every rank; answers give bytes read and peak memory. With `model`, what is in the
        checkpoint, a rank that sends more than a tensor of it is lost."""
        for rank in self._ranks:
            rank.connection.most = None if model is None else report_bytes(model)
        command = LoadModel(str(path), self.config, dict(rules or {}))
        return self.call(command, timeout=self.config.start_timeout_seconds)

    def patch(self, patches: Iterable[Mapping[int, StagePatch]]) -> None:
        """Replace the patches in force; each maps ranks to their own share of it. They are sent as they are made, one
        tensor a frame, and come into force together."""
        counts = [0] * self.config.tp
        for shares in patches:
            for rank, share in shares.items():
                self._send(rank, share)
                counts[rank] += 1
        for rank, count in enumerate(counts):
            self._send(rank, PutPatches(count))
        self.collect(PutPatches(0), self.config.timeout_seconds)

    def call(self, command: RankCommand[A], *, timeout: float | None = 0) -> list[A]:
        """Send one command to all ranks and return their answers in rank order.

        `timeout`: seconds without any progress, None for no limit, 0 for the configured one.
        """
        self.send(command)
        return self.collect(command, self.config.timeout_seconds if timeout == 0 else timeout)

    def send(self, command: RankCommand[A]) -> None:
        """Send one command to all ranks without waiting."""
        for rank in range(self.config.tp):
            self._send(rank, command)

    def collect(
        self, command: RankCommand[A], timeout: float | None, poll: Callable[[], None] | None = None
    ) -> list[A]:
        """Every rank's answer to the command sent last. `poll` is called some ten times a second while waiting (to
        interrupt).

        RankTimeout when for `timeout` seconds no rank has answered or entered an operation, and the one that the
        others wait for has not computed either: a long pass that moves on, or a slow machine, is not hung.
        """
        return self._gather(answers_of(command), timeout, poll)

    def check(self) -> None:
        """Between commands: RankError where a rank is gone, which nobody else would notice before the next one."""
        if self._ranks and (gone := self._receive({}, 0)):
            self._lost(gone)

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
        return [standing_text(rank, self.board.latest(rank), self._taps) for rank in range(self.config.tp)]

    def blame(self, answered: Collection[int] = ()) -> str:
        """Which rank the others wait for, of those that are to answer a command and have not `answered`."""
        return hang_text(self._traces(answered), self._taps)

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

    def _send(self, rank: int, command: RankCommand[A]) -> None:
        if not self._ranks:
            raise RankError("the engine has ended: restart it")
        try:
            self._ranks[rank].connection.send(command)
        except Disconnected:
            self._lost({rank: self._ranks[rank].epitaph()})

    def _gather(
        self, kind: type[A], timeout: float | None, poll: Callable[[], None] | None = None
    ) -> list[A]:
        answers: dict[int, Answer] = {}
        self._captured: list[list[CapturedTensor]] = [[] for _ in self._ranks]
        patience = Patience(timeout, lambda: self._traces(answers), self.config.timeout_seconds)
        warned = False
        while len(answers) < len(self._ranks):
            if lost := self._receive(answers, 0.1):
                self._lost(lost)
            if any(isinstance(answer, CommandFailure) for answer in answers.values()):
                self._failed(answers)
            if poll is not None:
                poll()
            if patience.over(len(answers) + self.board.operations() + sum(map(len, self._captured))):
                self._hung(answers, patience.spent)
            if not warned and patience.stopped_for >= STOPPED_SECONDS:
                warned = True
                self._warn(stopped_text(self._traces(answers), self._taps))
        found: list[A] = []
        for rank, answer in sorted(answers.items()):
            if not isinstance(answer, kind):
                self._lost({rank: f"it answered with a {type(answer).__name__}, which was not asked for"})
            self._hand_over(rank, answer)
            found.append(answer)
        return found

    def _hand_over(self, rank: int, answer: Answer) -> None:
        """Give the report of a pause the tensors that came with it, and that of a step all of the step's."""
        if isinstance(answer, PauseReport):
            answer.tensors = self._captured[rank]
            # The tensor that the rank stands at may still be patched: it comes again.
            self._passed[rank] += [one for one in answer.tensors if one.tap != answer.pause.place]
        else:
            if isinstance(answer, StepReport):
                answer.tensors = self._passed[rank] + self._captured[rank]
            if isinstance(answer, StepReport | StepAbandoned):
                self._passed[rank] = []

    def _receive(self, answers: dict[int, Answer], seconds: float) -> dict[int, str]:
        """Put the answers that come within so many seconds into `answers`; returns which ranks are gone, and why."""
        gone = {}
        for key, _ in self._selector.select(seconds):
            rank: Rank = key.data
            try:
                answer = rank.connection.receive()
            except MalformedMessage as error:
                gone[rank.rank] = str(error)
            except Disconnected:
                gone[rank.rank] = rank.epitaph()
            else:
                if isinstance(answer, CapturedTensor):
                    self._captured[rank.rank].append(answer)
                else:
                    answers[rank.rank] = answer
        return gone

    def _traces(self, answered: Collection[int]) -> list[RankTrace]:
        return [
            RankTrace(one.rank, self.board.history(one.rank), one.vitals(), one.rank in answered)
            for one in self._ranks
        ]

    def _ended(self, message: str, kind: type[RankError] = RankError) -> RankError:
        """End every rank; returns the error that states why, where each stood and what it did last."""
        where = "; ".join(self.standing())
        ranks = range(self.config.tp)
        operations = [history_texts(self.board.history(rank), self._taps) for rank in ranks]
        self.close(patience=0)
        return kind(f"{message} ({where})", operations)

    def _failed(self, answers: dict[int, Answer]) -> NoReturn:
        """At least one rank answered with an error: the user's mistake is raised as such when all ranks
        agree (they are still in step); anything else ends the engine."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while len(answers) < len(self._ranks) and time.monotonic() < deadline:
            if gone := self._receive(answers, 0.1):
                self._lost(gone)  # what the others report of it is a consequence: the connection to it broke
        failed = {rank: answer for rank, answer in answers.items() if isinstance(answer, CommandFailure)}
        first, error = min(failed.items())
        kind = _ERRORS.get(error.kind, EngineError)
        expected = all(answer.expected for answer in failed.values())
        if expected and len(failed) == len(self._ranks):
            raise kind(error.message)
        names = ", ".join(str(rank) for rank in sorted(failed))
        if expected:  # the ranks are no longer in step, but the message states what the user can do
            self.close(patience=0)
            raise kind(f"{error.message} (on rank {names} alone: the engine was ended)")
        out_of_step = divergence_text(self._traces(answers), self._taps)
        message = f"rank {names} raised {error.kind}: {error.message}; {out_of_step}".removesuffix("; ")
        lost = self._ended(message)
        lost.add_note(f"rank {first}:\n{error.traceback}")
        raise lost

    def _lost(self, gone: Mapping[int, str]) -> NoReturn:
        message = "; ".join(f"rank {rank} is lost: {why}" for rank, why in gone.items())
        # One that is stopped while it sends is late, as it is at any other time.
        held = all(self._ranks[rank].vitals().held for rank in gone)
        raise self._ended(message, RankTimeout if held else RankError)

    def _hung(self, answers: Mapping[int, Answer], seconds: float) -> NoReturn:
        silent = ", ".join(str(rank.rank) for rank in self._ranks if rank.rank not in answers)
        message = f"{self.blame(answers)}. No answer from rank {silent} within {seconds:g} s"
        raise self._ended(message, RankTimeout)
