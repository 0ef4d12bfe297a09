"""While the ranks start and load: what is being done, for how long, the keys that wait for it, and a way out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from lockstep.sessions.errors import SessionError
from lockstep.sessions.text import clean
from lockstep.workbench.tui.drivers.live import LiveDriver
from lockstep.workbench.tui.drivers.port import CommandFailed
from lockstep.workbench.tui.guard import Guarded
from lockstep.workbench.tui.keys import shown
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.tui.widgets.text_block import TextBlock, wrapped

#: How many keys are kept for the screen that comes.
_MOST_KEYS = 32
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class StartingScreen(Guarded, Screen[None]):
    """Starts a model, then gives way to the screen that `then` makes of its session, its driver and the keys that were
    pressed meanwhile."""

    CSS_PATH = "../styles/starting.tcss"
    AUTO_FOCUS = ""  # no key scrolls: all wait for what comes
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+c", "cancel", "Cancel", priority=True)]

    def __init__(
        self,
        driver: LiveDriver,
        what: str,
        then: Callable[[Reader, LiveDriver, list[events.Key]], Screen[None]],
    ) -> None:
        super().__init__()
        self.driver, self.what, self._then = driver, what, then
        self._began = time.monotonic()
        self._failed = False
        self._early: list[events.Key] = []

    def compose(self) -> ComposeResult:
        """A few lines in the middle."""
        yield TextBlock(id="starting")

    def on_mount(self) -> None:
        """Start."""
        self.set_interval(0.1, self._tick)
        self._start()

    def _tick(self) -> None:
        if self._failed:
            return
        elapsed = time.monotonic() - self._began
        frame = _FRAMES[int(elapsed * 10) % len(_FRAMES)] if elapsed > 0.2 else " "
        lines = self.query_one(TextBlock)
        wrong = self.driver.unresponsive or self.driver.warning
        lines.show(
            [
                [(f"{frame} ", "accent"), (self.what, "strong")],
                [("  starting the ranks and loading the weights", "quiet"), (f"   {elapsed:.0f} s", "quiet")],
                *([("  ", "text"), *row] for row in wrapped(wrong, "wrong", lines.size.width - 2) or [[]]),
                *([("  ", "text"), *row] for row in wrapped(self._waiting, "accent", lines.size.width - 2)),
                [("  esc", "text"), (" cancels", "quiet")],
            ]
        )

    @property
    def _waiting(self) -> str:
        """The keys that wait; "" for none."""
        if not self._early:
            return ""
        full = "   no more are taken" if len(self._early) >= _MOST_KEYS else ""
        return f"then  {' '.join(shown(event.key) for event in self._early)}{full}"

    @property
    def key_keeper(self) -> StartingScreen:
        """Who holds keys back, for the application."""
        return self

    def holds(self, event: events.Key) -> bool:
        """Whether a key waits: one of the workbench acts once there is one."""
        if self._failed or event.key == "escape" or event.key.startswith("ctrl+"):
            return False
        if len(self._early) < _MOST_KEYS:
            self._early.append(event)
        return True

    @work(exclusive=True)
    async def _start(self) -> None:
        try:
            reader = Reader.open(await self.driver.start(), follow=False)
        except (CommandFailed, SessionError, OSError) as error:
            self._failed = True
            self.driver.close()
            self._show_failure(clean(str(error), limit=1000, newlines=True))
            return
        except Exception as error:
            self._failed = True
            self.driver.close()
            self._show_failure(clean(f"{type(error).__name__}: {error}", limit=1000, newlines=True))
            raise  # to the outer net, which keeps the traceback
        self.app.switch_screen(self._then(reader, self.driver, self._early))

    def _show_failure(self, message: str) -> None:
        """The whole message, however long its paths are: what to do about it often stands at the end."""
        lines = self.query_one(TextBlock)
        rows = [row for line in message.split("\n") for row in wrapped(line, "text", lines.size.width - 2)]
        marks = [("✗ ", "wrong"), *[("  ", "text")] * (len(rows) - 1)]
        lines.show(
            [
                *[[mark, *row] for mark, row in zip(marks, rows, strict=False)],
                [],
                [("  esc", "text"), (" goes back", "quiet")],
            ]
        )

    def action_cancel(self) -> None:
        """Give up: the host ends with its ranks."""
        self.workers.cancel_node(self)
        self.driver.close()
        if len(self.app.screen_stack) > 2:
            self.app.pop_screen()
        else:
            self.app.exit(3 if self._failed else 130)
