"""A dialog over the screens that asks for something, and is answered once."""

from __future__ import annotations

from typing import TypeVar

from textual.await_complete import AwaitComplete
from textual.screen import ModalScreen

from lockstep.workbench.tui.guard import Guarded

Answer = TypeVar("Answer")


class Dialog(Guarded, ModalScreen[Answer]):
    """Textual takes the screen on top away whenever one is dismissed: keys that come before the dialog is gone, as on a
    busy machine, would take away what is below it, or be an error where nothing is."""

    _answered = False

    def dismiss(self, result: Answer | None = None) -> AwaitComplete:
        """As Textual's, the first time."""
        if self._answered:
            return AwaitComplete()
        self._answered = True
        return super().dismiss(result)
