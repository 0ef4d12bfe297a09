"""From what was found to the screen that shows it."""

from __future__ import annotations

from collections.abc import Sequence

from textual.screen import Screen

from workbench.demo import MODEL_DIR
from workbench.models.identify import Found
from workbench.tui.live import Engine
from workbench.tui.screens.live import LiveWorkbench
from workbench.tui.screens.model_form import ModelChoice
from workbench.tui.screens.starting import StartingScreen


def starting(words: Sequence[str], what: str) -> Screen[None]:
    """The screen that starts a host on `words` and becomes the live workbench."""
    return StartingScreen(Engine(words), what, LiveWorkbench)


def demo() -> Screen[None]:
    """The demo, on two ranks, with its own prompt."""
    return starting(["demo", "--tp", "2"], "the demo, 2 ranks")


def model(found: Found, choice: ModelChoice) -> Screen[None]:
    """A model as it was chosen to run."""
    if found.path == MODEL_DIR and not choice.prompt:
        return demo()
    words = [str(found.path), "--tp", str(choice.tp), "--prompt", choice.prompt]
    return starting(words, f"{found.path.name}, {choice.tp} ranks")
