"""The engine's errors: each states what, where, and what to do next (torch-free)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class ConfigError(EngineError, ValueError):
    """A configuration that cannot work; the message names the numbers that would."""


class CheckpointError(EngineError):
    """A checkpoint that cannot be loaded; the message names the file, the tensor, what was expected."""


class RequestError(EngineError, ValueError):
    """A prompt or command that cannot be served (empty, too long, ids out of range, no free blocks)."""


class RankError(EngineError):
    """A rank raised, died, hung or fell out of step; the message names it and the operation each rank was at.
    `operations`: the last ones of each rank, oldest first."""

    def __init__(self, message: str, operations: Sequence[Sequence[str]] = ()) -> None:
        super().__init__(message)
        self.operations = operations


class RankTimeout(RankError):
    """A rank did not answer in time."""


class LibraryPanic(RuntimeError):
    """What a library has thrown past `Exception`, as code in Rust does that panics."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """What a library throws past `Exception` becomes a LibraryPanic, which nets for errors hold. What asks the program
    or a task to end passes."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as panic:
        from asyncio import CancelledError  # Imported here: where a task is cancelled, it has been

        if isinstance(panic, CancelledError):
            raise
        raise LibraryPanic(f"{type(panic).__name__}: {panic}") from panic
