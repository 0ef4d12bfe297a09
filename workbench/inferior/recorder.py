"""Writing an inferior's passes to a session. A disk that is full ends the recording, not the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from sessions import SessionWriteError, SessionWriter
from sessions.budget import fit
from sessions.records import StepInFlight, StepRecord, TensorRecord
from workbench.inferior.token_recorder import TokenRecorder

T = TypeVar("T")


@dataclass(slots=True)
class StepRecorder:
    """Where passes are recorded: nowhere without a `writer`, or without a `branch`."""

    on_warning: Callable[[str], None]
    writer: SessionWriter | None = None
    branch: int | None = 0
    tokens: TokenRecorder | None = None
    extra_tensors: Sequence[TensorRecord] = ()  # recorded with the next pass, beside what it captures

    def step(self, record: StepRecord, budget: int | None) -> None:
        """Record a pass, its tensors within `budget` bytes (None: all), if it is one to record."""
        writer, branch = self.writer, self.branch
        if writer is None or branch is None:
            return
        tensors, dropped = record.tensors, record.dropped
        if budget is not None:
            tensors, dropped = fit(tensors, budget)
        whole = replace(record, tensors=(*tensors, *self.extra_tensors), dropped=dropped)
        self.guard(lambda: self._write(writer, branch, whole))

    def paused(self, flight: StepInFlight, budget: int | None) -> None:
        """Show what a pass that stands still has left behind so far; the record of the whole pass replaces it."""
        writer, branch = self.writer, self.branch
        if writer is None or branch is None:
            return
        tensors = flight.tensors if budget is None else fit(flight.tensors, budget)[0]
        shown = replace(flight, tensors=tensors)
        self.guard(lambda: writer.in_flight(branch, shown))

    def read_in_flight(self, branch: int, step: int, tensors: Sequence[TensorRecord]) -> None:
        """Add tensors that were read from the pass that stands still."""
        writer = self.writer
        if writer is not None:
            self.guard(lambda: writer.tensors(branch, step, tensors))

    def abandoned(self) -> None:
        """The pass that stood still was broken off."""
        writer = self.writer
        if writer is not None:
            self.guard(writer.abandon_flight)

    def guard(self, write: Callable[[], T], otherwise: T | None = None) -> T | None:
        """What `write` returns; `otherwise` where it could not write, which ends the recording with a warning."""
        writer = self.writer
        try:
            return write()
        except SessionWriteError as error:
            self.writer = None
            lost = "" if writer is None else f" at step {writer.next_step(self.branch or 0)}"
            self.on_warning(f"recording stopped{lost}: {error} The run goes on unrecorded.")
            return otherwise

    def _write(self, writer: SessionWriter, branch: int, record: StepRecord) -> None:
        writer.step(branch, record)
        if self.tokens is not None:
            self.tokens.note(record)
