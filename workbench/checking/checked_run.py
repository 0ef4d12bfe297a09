"""A run that can be made again and again on the same tokens, and its recordings in other ways than the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from lockstep.engine.scratch import ScratchFolder
from lockstep.sessions import VerdictRecord
from lockstep.workbench.checking.corrections import Corrections
from lockstep.workbench.checking.lanes import awaited, lane
from lockstep.workbench.judgements.golden_event import GoldenEvent
from lockstep.workbench.models.capture import FULL, Capture

#: `progress(what, done, of)`: what is done, and how many of its forward passes are over (`of` 0: it makes none).
Progress = Callable[[str, int, int], None]


class CheckedRun(Protocol):
    """A run that can be made again and again on the same tokens."""

    @property
    def path(self) -> Path:
        """Where the run as it is gets recorded."""
        ...

    @property
    def branch(self) -> int:
        """The branch whose run it is, in the session that keeps the verdicts."""
        ...

    @property
    def checkpoint(self) -> Path:
        """Whose weights let more causes be named."""
        ...

    @property
    def rules(self) -> Mapping[str, str]:
        """Those in force."""
        ...

    @property
    def progress(self) -> Progress:
        """Takes how far the comparison has come; what it raises ends it."""
        ...

    def record(
        self,
        path: Path,
        corrected: Corrections | None = None,
        capture: Capture = FULL,
        progress: Progress | None = None,
    ) -> None:
        """Run it from the beginning and record what `capture` names, as branch 0 of a new session at `path`;
        `corrected(step)` are patches of that step. `progress` takes how far it has come in place of the run's own."""
        ...

    def store(self, verdicts: Sequence[VerdictRecord], event: GoldenEvent) -> None:
        """Keep what was found."""
        ...


class _Stopped(Exception):
    """Nobody waits for the recording any more."""


class RunsAgain:
    """The same run once more, recorded aside in other ways, one after the other."""

    def __init__(self, run: CheckedRun, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._lane: Executor
        self._progress = run.progress
        self._reached, self._stopped = ("", 0, 0), False

    @classmethod
    @contextmanager
    def of(cls, run: CheckedRun, beside: bool) -> Iterator[RunsAgain]:
        """Inside, the run can be recorded again: `beside` what is done meanwhile, else before anything else is done."""
        with ScratchFolder.make("again") as folder:
            again = cls(run, folder.path)
            if beside:
                again._progress = again._note
            with lane(beside, again._stop) as again._lane:
                yield again

    def record(
        self, name: str, corrected: Corrections | None = None, capture: Capture = FULL
    ) -> Future[Path]:
        """The recording, which will be there once what was asked for before it is."""

        def recorded() -> Path:
            path = self._folder / f"{name}.session"
            self._run.record(path, corrected, capture, self._progress)
            return path

        return self._lane.submit(recorded)

    def awaited(self, recording: Future[Path]) -> Path:
        """Where it was recorded, once that is over."""
        return awaited(recording, lambda: self._run.progress(*self._reached))

    def _note(self, what: str, done: int, of: int) -> None:
        """Progress is shown by who waits: of what goes on meanwhile something else is."""
        if self._stopped:
            raise _Stopped
        self._reached = what, done, of

    def _stop(self) -> None:
        self._stopped = True
