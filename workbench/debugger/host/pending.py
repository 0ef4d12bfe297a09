"""Requests under way: the type of answer that each waits for, and the errors that may come instead."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Generic, TypeVar

from lockstep.engine.ranks.wire import MalformedMessage
from lockstep.workbench.debugger.host.messages import ErrorAnswer, ErrorInfo
from lockstep.workbench.exit_codes import Exit

A = TypeVar("A")


class HostError(Exception):
    """A request that failed. `kind` is the error's class at the host, `exit_code` the design's; `line` and
    `caret` point into a command that was not understood."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.message)
        self.kind, self.exit_code = error.kind, error.exit_code
        self.line, self.caret = error.line, error.caret


class HostLost(HostError):
    """The host's process is gone."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorInfo("HostLost", message, Exit.RANK_LOST))


class Pending(Generic[A]):
    """A request under way and the type of its answer."""

    def __init__(self, expected: type[A]) -> None:
        self.expected, self.future = expected, Future[A]()

    def settle(self, answer: object) -> None:
        """The answer has come. MalformedMessage where it is one to another request."""
        if not isinstance(answer, self.expected | ErrorAnswer):
            raise MalformedMessage(f"{type(answer).__name__} where {self.expected.__name__} was asked for")
        if not self.future.set_running_or_notify_cancel():
            return
        if isinstance(answer, ErrorAnswer):
            self.future.set_exception(HostError(answer.error))
        else:
            self.future.set_result(answer)

    def fail(self, message: str) -> None:
        """No answer will come."""
        if not self.future.done():
            self.future.set_exception(HostLost(message))
