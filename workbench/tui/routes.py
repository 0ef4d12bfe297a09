"""The ways from what is to be opened to the screen that shows it. Screens know nothing of each other's successors.

Modules are imported when their screen is needed: the first paint waits for no other's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from textual.events import Key
from textual.screen import Screen

from lockstep.workbench.tui import settings
from lockstep.workbench.tui.screens.opening import OpeningScreen
from lockstep.workbench.tui.settings import UserSettings

if TYPE_CHECKING:
    from lockstep.workbench.models.identify import Found
    from lockstep.workbench.tui.drivers.live import LiveDriver
    from lockstep.workbench.tui.reader import Reader
    from lockstep.workbench.tui.screens.model_form import ModelChoice

#: Makes a screen under the user's settings.
Route = Callable[[UserSettings], Screen[None]]


def session(path: Path) -> Route:
    """A saved session."""

    def opened(chosen: UserSettings) -> Callable[[], Screen[None]]:
        from lockstep.workbench.tui.drivers.replay import ReplayDriver
        from lockstep.workbench.tui.reader import Reader
        from lockstep.workbench.tui.screens.workbench import WorkbenchScreen

        reader = Reader.open(path)
        settings.remember(path)
        return lambda: WorkbenchScreen(reader, ReplayDriver(path), chosen)

    return lambda chosen: OpeningScreen(path.name, lambda: opened(chosen))


def running(words: Sequence[str], what: str) -> Route:
    """A host that is started on `words`, then the workbench on it."""

    def make(chosen: UserSettings) -> Screen[None]:
        from lockstep.workbench.tui.drivers.live import LiveDriver
        from lockstep.workbench.tui.screens.starting import StartingScreen
        from lockstep.workbench.tui.screens.workbench import WorkbenchScreen

        def started(reader: Reader, driver: LiveDriver, early: list[Key]) -> Screen[None]:
            screen = WorkbenchScreen(reader, driver, chosen)
            screen.keymap.early = early
            return screen

        return StartingScreen(LiveDriver([*chosen.host_words, *words]), what, started)

    return make


def demo() -> Route:
    """The demo, on two ranks, with its own prompt."""
    return running(["demo", "--tp", "2"], "the demo, 2 ranks")


def model(found: Found, choice: ModelChoice) -> Route:
    """A model as it was chosen to run."""
    from lockstep.workbench.demo import MODEL_DIR

    if found.path == MODEL_DIR and not choice.prompt:
        return demo()
    words = [str(found.path), "--tp", str(choice.tp), "--prompt", choice.prompt]
    return running(words, f"{found.path.name}, {choice.tp} ranks")
