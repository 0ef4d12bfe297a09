"""The line above the keys of the split view: what was done, or what runs."""

from __future__ import annotations

from lockstep.workbench.tui.widgets.status_line import Fact, StatusLine


class SplitMessage(StatusLine):
    """What runs gives way to what it answered, and goes when it is over."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._running = False

    def report(self, text: str, wrong: bool = False) -> None:
        """Show what was done."""
        self._running = False
        self.show([*([Fact("✗", "wrong")] if wrong else []), Fact(text, "text")])

    def progress(self, text: str) -> None:
        """Show what runs; "" where nothing does."""
        if text or self._running:
            self.report(text)
        self._running = bool(text)
