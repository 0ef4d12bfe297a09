"""A session on its way to the screen: painted at once, while what reads it is imported and opened."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.screen import Screen

from lockstep.engine.errors import panics_as_errors
from lockstep.engine.text import printable
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.tui.guard import Guarded
from lockstep.workbench.tui.widgets.divider import Divider
from lockstep.workbench.tui.widgets.status_line import Fact, StatusLine


class OpeningScreen(Guarded, Screen[None]):
    """Gives way to the screen that `opened` makes, on a thread what can be done there, the screen itself in the event
    loop. A file that is no session ends the program, or goes back to the home screen."""

    def __init__(self, name: str, opened: Callable[[], Callable[[], Screen[None]]]) -> None:
        super().__init__()
        self._name, self._opened = name, opened

    def compose(self) -> ComposeResult:
        """The workbench's first lines."""
        yield StatusLine(id="status")
        yield Divider()

    def on_mount(self) -> None:
        """Paint, then open."""
        self.query_one(StatusLine).show((Fact(printable(self._name), "strong"), Fact("opening …", "quiet")))
        self.call_after_refresh(self._open)

    @work(thread=True)
    def _open(self) -> None:
        # On a thread, and only now: numpy and the panes take as long to import as all that was painted.
        from lockstep.sessions.errors import SessionError

        try:
            with panics_as_errors():
                make = self._opened()
        except (SessionError, OSError) as error:
            self.app.call_from_thread(self._refused, printable(error, 500))
        except Exception as error:
            why = f"{self._name} cannot be opened: {type(error).__name__}: {error}"
            self.app.call_from_thread(
                self.app._handle_exception, error
            )  # the outer net, while there is an app
            self.app.call_from_thread(self._refused, printable(why, 500), Exit.DEFECT)
        else:
            self.app.call_from_thread(lambda: self.app.switch_screen(make()))

    def _refused(self, why: str, code: int = Exit.CANNOT_LOAD) -> None:
        if len(self.app.screen_stack) > 2:
            self.app.pop_screen()
            self.notify(why, severity="error")
        else:
            self.app.exit(
                return_code=code, message=Text(f"lockstep: {why}")
            )  # a str would be parsed as markup
