"""Writing an inferior's passes to a session. What cannot be written waits in memory: the run goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from lockstep.engine.taps.names import matches
from lockstep.sessions import SessionWriteError, SessionWriter
from lockstep.sessions.budget import fit
from lockstep.sessions.errors import RecordingLost
from lockstep.sessions.records import StepInFlight, StepRecord, TensorRecord
from lockstep.workbench.inferior.backlog import KEPT_STEPS, Backlog
from lockstep.workbench.inferior.token_recorder import TokenRecorder
from lockstep.workbench.models.capture import Capture

T = TypeVar("T")


@dataclass(slots=True)
class StepRecorder:
    """Where passes are recorded: nowhere without a `writer`, or without a `branch`."""

    on_warning: Callable[[str], None]
    writer: SessionWriter | None = None
    branch: int | None = 0
    tokens: TokenRecorder | None = None
    extra_tensors: Sequence[TensorRecord] = ()  # recorded with the next pass, beside what it captures
    backlog: Backlog = field(default_factory=Backlog)
    #: Why something could not be recorded in time, until a step was again, with all that belongs to it: on a disk that
    #: is nearly full, steps without tensors fit.
    trouble: str = ""
    advice: str = ""  # what the user can do about it besides making room

    def begin(self, writer: SessionWriter, tokens: TokenRecorder | None) -> None:
        """Record to a new session from now on."""
        self.writer, self.branch, self.tokens = writer, 0, tokens
        self.backlog, self.trouble = Backlog(), ""

    def stop(self) -> None:
        """Record nothing from now on. The writer is left to its owner."""
        self.writer, self.tokens, self.backlog, self.trouble = None, None, Backlog(), ""

    @property
    def up_to_date(self) -> bool:
        """Whether nothing waits to be recorded."""
        return self.writer is not None and not self.backlog

    def waiting(self, branch: int, step: int) -> StepRecord | None:
        """A step that was run and waits to be recorded."""
        return self.backlog.step(branch, step)

    def step(self, record: StepRecord, capture: Capture) -> None:
        """Record a pass, its tensors as far as `capture` has room for them, if it is one to record."""
        branch = self.branch
        if self.writer is None or branch is None:
            return
        tensors, dropped = _fitted(record.tensors, capture)
        whole = replace(record, tensors=(*tensors, *self.extra_tensors), dropped=(*record.dropped, *dropped))
        behind = bool(self.trouble)
        self._attempt(lambda writer: writer.step(branch, whole), lambda: self.backlog.add_step(branch, whole))
        if behind and not self.backlog:
            self._caught_up()
        if self.tokens is not None:
            self.tokens.note(record)
            self.write(self.tokens.flush)

    def paused(self, flight: StepInFlight, capture: Capture) -> None:
        """Show what a pass that stands still has left behind so far; the record of the whole pass replaces it."""
        branch = self.branch
        if branch is None:
            return
        shown = replace(flight, tensors=_fitted(flight.tensors, capture)[0])
        self._attempt(lambda writer: writer.in_flight(branch, shown), lambda: None)

    def abandoned(self) -> None:
        """The pass that stood still was broken off."""
        self._attempt(lambda writer: writer.abandon_flight(), lambda: None)

    def write(self, write: Callable[[SessionWriter], T]) -> T | None:
        """What `write` returns; None where it could not be carried out now, and waits."""
        return self._attempt(write, lambda: self.backlog.add(write))

    def write_tensors(self, branch: int, step: int, tensors: Sequence[TensorRecord]) -> None:
        """Add tensors to a recorded step, or to the one that stands still. Where that fails they are not kept: they
        can be computed again."""
        self._attempt(lambda writer: writer.tensors(branch, step, tensors), lambda: None)

    def move(self, path: Path) -> None:
        """Record on at `path`, with all that is in the session so far and all that waits. `FileExistsError` where there
        is something; `SessionWriteError` where it cannot be written."""
        old = self.writer
        assert old is not None, "nothing is recorded"
        self.writer = new = old.continued_at(path)
        with contextlib.suppress(SessionWriteError):  # it was taken away, or its disk is full: that is why
            old.close()
        self.backlog.flush(new)
        if self.trouble:
            self._caught_up()

    def close(self) -> None:
        """Write what waits, and close the session. `RecordingLost` names what is not in it."""
        writer, self.writer = self.writer, None
        if writer is None:
            return
        try:
            self.backlog.flush(writer)
        except SessionWriteError as error:
            with contextlib.suppress(SessionWriteError):
                writer.close()
            raise RecordingLost(f"{self.backlog.extent} not recorded: {error}") from error
        writer.close()
        if lost := self.backlog.losses:
            raise RecordingLost(f"{lost} are not in {writer.path}, which could not be written at the time.")

    def _attempt(self, write: Callable[[SessionWriter], T], otherwise: Callable[[], None]) -> T | None:
        if self.writer is None:
            return None
        try:
            self.backlog.flush(self.writer)
            return write(self.writer)
        except SessionWriteError as error:
            otherwise()
            if not self.trouble:
                since, self.trouble = self.writer.next_step(self.branch or 0), str(error)
                self.on_warning(
                    f"nothing is recorded since step {since}: {error} The run goes on; its steps wait in memory"
                    f" (without tensors, the last {KEPT_STEPS} with statistics) until there is room.{self.advice}"
                )
            return None

    def _caught_up(self) -> None:
        late, lost = self.backlog.take_late(), self.backlog.losses
        self.trouble = ""
        self.on_warning(
            f"recording goes on{late and f': {late} recorded late'}{lost and f'; {lost} are lost'}"
        )


def _fitted(tensors: Sequence[TensorRecord], capture: Capture) -> tuple[list[TensorRecord], list[str]]:
    """The tensors that there is room for, those that were asked for by name first, and what was dropped."""
    if capture.budget_bytes is None:
        return list(tensors), []
    asked = [one for one in tensors if matches(one.tap, capture.full)]
    kept, dropped = fit([one for one in tensors if not matches(one.tap, capture.full)], capture.budget_bytes)
    return [*asked, *kept], dropped
