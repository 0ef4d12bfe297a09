"""What the parts of a workbench may ask of its screen."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from textual.app import App
from textual.screen import Screen

from lockstep.workbench.tui.panes.base import Pane
from lockstep.workbench.views.overview import Overview, Present
from lockstep.workbench.views.where import Where


class Bench(Protocol):
    """A session on screen, looked at from one place."""

    overview: Overview | None

    @property
    def screen(self) -> Screen[Any]:
        """The screen itself."""

    @property
    def app(self) -> App[Any]:
        """The application."""

    @property
    def place(self) -> Where:
        """What is looked at."""

    @property
    def present(self) -> Present | None:
        """The step that is looked at, as it was read last."""

    @property
    def front(self) -> Pane | None:
        """The pane in front."""

    def look(self, where: Where) -> None:
        """Look at a place; at the same one again, where more is known of it now."""

    def report(self, text: str, wrong: bool = False, keep: bool = True, finding: bool = False) -> None:
        """Show a text in the message line, and in the Journal if it is to be kept: as an error where it is `wrong`,
        unless it is a `finding` about the model."""

    def show_some_pane(self) -> Coroutine[Any, Any, None]:
        """Bring the first pane to the front, unless the user has asked for another one."""

    def show_pane(self, number: int) -> Coroutine[Any, Any, None]:
        """Bring a pane to the front."""
