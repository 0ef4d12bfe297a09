"""The terminal application: themes, the first screen, and going from one screen to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from workbench.tui import settings
from workbench.tui.settings import Settings
from workbench.tui.theme import THEMES

if TYPE_CHECKING:
    from workbench.tui.screens.home import HomeScreen


class LockstepApp(App[int]):
    """Lockstep's screens. `first` makes the screen that is shown first."""

    TITLE = "lockstep"
    CSS_PATH = "styles/app.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "quit", "Quit", priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False),
    ]

    def __init__(self, first: Callable[[], Screen[None]], chosen: Settings | None = None) -> None:
        super().__init__()
        self.settings = chosen or Settings()
        self._first = first
        for name in list(self.available_themes):
            self.unregister_theme(name)
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = self.settings.theme

    def on_mount(self) -> None:
        """Show the first screen; remember a theme that is chosen later."""
        self.push_screen(self._first())
        self.theme_changed_signal.subscribe(self, lambda theme: self.keep("theme", theme.name))

    def keep(self, key: str, value: str) -> None:
        """Remember a setting for the next time; a directory that cannot be written is said, and no more."""
        self.settings = replace(self.settings, **{key: value})
        try:
            settings.save(key, value)
        except OSError as error:
            self.notify(f"{settings.config_file()}: not kept: {error.strerror}", severity="warning")

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The palette: the screen's own keys first, then the application's."""
        # Not at the top: the palette is opened long after the first paint.
        from workbench.tui.screens.actions import TITLES, WorkbenchActions
        from workbench.tui.screens.keys import KEYS

        if isinstance(screen, WorkbenchActions):
            for number, title in enumerate(TITLES, 1):
                yield SystemCommand(title, f"pane {number}", lambda n=number: self._act(f"screen.pane({n})"))
            for key in KEYS:
                if key.key not in ("ctrl+c", "colon"):
                    told = f"{key.shown}   {screen.why_not(key.key) or key.command}".rstrip()
                    yield SystemCommand(
                        key.what.capitalize(), told, lambda k=key: self._act(f"screen.{k.action}")
                    )
        for name in ("lockstep-dark", "lockstep-light"):
            yield SystemCommand(f"Theme: {name}", "", lambda n=name: setattr(self, "theme", n))
        yield SystemCommand("Quit", "ctrl+q", self.action_quit)

    def _act(self, action: str) -> None:
        self.call_later(self.run_action, action)

    def on_home_screen_open(self, event: HomeScreen.Open) -> None:
        """The home screen has something to open."""
        # Not at the top: the home screen is painted before these are needed.
        from workbench.tui import opening
        from workbench.tui.screens.model_form import ModelForm
        from workbench.tui.screens.opening import OpeningScreen

        found = event.found
        settings.remember(found.path)
        if found.kind == "session":
            self.push_screen(OpeningScreen(found.path))
        elif not found.needs_prompt:
            self.push_screen(opening.demo())
        else:
            self.push_screen(
                ModelForm(found), lambda choice: choice and self.push_screen(opening.model(found, choice))
            )
