"""What a long call reports while it runs."""

from __future__ import annotations


class Listener:
    """Hears of a call's progress. This one keeps it to itself; the command line's shows it on stderr."""

    def report(self, text: str) -> None:
        """What is being done now, until the next is reported."""

    def count(self, what: str, done: int, of: int) -> None:
        """How far that has come; `of` 0: it is not counted."""

    def clear(self) -> None:
        """What was being done is over."""

    def found(self, text: str) -> None:
        """What is wrong, as far as is known by now: an operation, then all causes. The verdict takes longer."""

    def note(self, text: str) -> None:
        """Something to be known in any case."""

    def warn(self, text: str) -> None:
        """Something that the result may suffer from."""


class Warned(Listener):
    """Passes everything on, and keeps the warnings for the result."""

    def __init__(self, listener: Listener | None) -> None:
        self._listener = listener or Listener()
        self.warnings: list[str] = []

    def report(self, text: str) -> None:
        """Pass it on."""
        self._listener.report(text)

    def count(self, what: str, done: int, of: int) -> None:
        """Pass it on."""
        self._listener.count(what, done, of)

    def clear(self) -> None:
        """Pass it on."""
        self._listener.clear()

    def found(self, text: str) -> None:
        """Pass it on."""
        self._listener.found(text)

    def note(self, text: str) -> None:
        """Pass it on."""
        self._listener.note(text)

    def warn(self, text: str) -> None:
        """Pass it on, and keep it."""
        self.warnings.append(text)
        self._listener.warn(text)
