"""The terminal application: themes, the first screen, and going from one screen to another."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual import events
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.css.query import NoMatches
from textual.driver import Driver
from textual.filter import ANSIToTruecolor, LineFilter
from textual.screen import Screen
from textual.widgets import Input
from textual.worker import WorkerFailed

from lockstep.workbench import error_log
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.settings import config_file
from lockstep.workbench.tui import routes, settings
from lockstep.workbench.tui.guard import FailureNotices, Guarded
from lockstep.workbench.tui.heap import map_large_arrays
from lockstep.workbench.tui.pasting import PasteParser, one_line
from lockstep.workbench.tui.routes import Route
from lockstep.workbench.tui.settings import SettingChosen, UserSettings
from lockstep.workbench.tui.theme import THEMES

if TYPE_CHECKING:
    from textual.command import Provider

    from lockstep.workbench.tui.screens.home import HomeScreen
    from lockstep.workbench.tui.screens.keymap import Keymap
    from lockstep.workbench.tui.screens.starting import StartingScreen

#: What ends the program from outside, and the seconds it then has to leave as it does on ctrl+q. A terminal that is
#: gone never takes the last bytes; a host that hears no more of its client ends by itself.
_ENDING = {signal.SIGTERM: 20.0, signal.SIGHUP: 1.0}


def _palette_entries() -> type[Provider]:
    from lockstep.workbench.tui.palette import PaletteEntries

    return PaletteEntries


class LockstepApp(Guarded, App[int]):
    """Lockstep's screens. `first` makes the one that is shown first."""

    TITLE = "lockstep"
    COMMANDS: ClassVar = {_palette_entries}  # loaded when the palette is first opened
    CSS_PATH = "styles/app.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "quit", "Quit", priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False),
    ]

    def __init__(self, first: Route, chosen: UserSettings | None = None) -> None:
        super().__init__()
        self.settings = chosen or UserSettings()
        self._first = first
        self._leaving = False
        self.recorded: list[Path] = []  # the live sessions on screen when a signal ended the program
        self.failures = FailureNotices(
            lambda text: self.notify(text, title="Error", severity="error", timeout=15)
        )
        for name in list(self.available_themes):
            self.unregister_theme(name)
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = self.settings.theme

    def on_mount(self) -> None:
        """Show the first screen; remember a theme that is chosen later."""
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING:
                signal.signal(number, self._end)
        if self.is_web:
            server = os.getppid()
            self.set_interval(1, lambda: None if os.getppid() == server else self.exit())
        # What is there once the screens stand is there to stay: a collection that walked it all would be a stall.
        self.set_interval(2, lambda: gc.freeze(), repeat=5)
        self.call_after_refresh(gc.enable)
        self.call_after_refresh(map_large_arrays)
        asyncio.get_running_loop().set_exception_handler(self._callback_failed)
        sys.setswitchinterval(0.001)  # a key does not wait for the thread that reads the session
        self.push_screen(self._first(self.settings))
        self.theme_changed_signal.subscribe(self, lambda theme: self.keep("theme", theme.name))

    def keep(self, key: str, value: str) -> None:
        """Remember a setting for the next time; a directory that cannot be written is reported, and no more."""
        self.settings = replace(self.settings, **{key: cast(Any, value)})
        try:
            settings.save(key, value)
        except OSError as error:
            self.notify(f"{config_file()}: not kept: {error.strerror}", severity="warning")

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The palette: what the screen offers first, then the application's own."""
        from lockstep.workbench.tui.palette import HasPalette

        if isinstance(screen, HasPalette):
            yield from screen.palette()
        for name in ("lockstep-dark", "lockstep-light"):
            yield SystemCommand(f"Theme: {name}", "", lambda n=name: setattr(self, "theme", n))
        yield SystemCommand("Quit", "ctrl+q", self.action_quit)

    def action_command_palette(self) -> None:
        """Open the palette."""
        from textual.command import CommandPalette

        if not isinstance(self.screen, CommandPalette):
            words = "words of a command, a pane, a toggle, or of its help …"
            self.push_screen(CommandPalette(placeholder=words, id="--command-palette"))

    async def on_event(self, event: events.Event) -> None:
        """Keys act here, one after another: what a key opens or focuses gets the next, however fast they come.

        Textual lets a key climb from the widget that has the focus up to the app, queue by queue, while the
        keys behind it are already on their way to that same widget: of a `:next` typed fast, the `n` acted.
        """
        if isinstance(event, events.Key) and not event.is_forwarded:
            self.failures.forget()
            keeper: StartingScreen | Keymap | None = getattr(self.screen, "key_keeper", None)
            if keeper is not None and keeper.holds(event):
                return
            field = self.focused
            if isinstance(field, Input) and event.character is not None and event.is_printable:
                field.replace(event.character, *field.selection)
                return
            if await self._check_bindings(event.key, priority=True) or await self._check_bindings(event.key):
                return
        elif isinstance(event, events.Paste) and not event.is_forwarded:
            event.text = one_line(event.text)  # for fields that are not ours, too: the palette's
        await super().on_event(event)

    async def _on_key(self, event: events.Key) -> None:
        """A key that nothing took when it was pressed, come back from where it was sent: nothing takes it now, for the
        focus may be elsewhere by then."""
        event.prevent_default()

    def get_driver_class(self) -> type[Driver]:
        """The driver of this system, with a parser that holds pastes together; it has no public place for one."""
        driver = super().get_driver_class()
        module = sys.modules[driver.__module__]
        if hasattr(module, "XTermParser"):
            module.XTermParser = PasteParser  # type: ignore[attr-defined]
        return driver

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Without the one that looks at every segment for a colour of the terminal's own: all of ours are true ones."""
        return [one for one in super().get_line_filters() if not isinstance(one, ANSIToTruecolor)]

    def notify(self, message: str, **named: Any) -> None:
        """Show a notice. Whatever it quotes may be a stranger's: never markup, nothing that a terminal obeys."""
        # Imported here: it takes numpy along, which the first paint does not wait for.
        from lockstep.sessions.text import clean

        super().notify(clean(message, newlines=True, limit=2000), **{**named, "markup": False})

    def exit(self, *arguments: Any, **named: Any) -> None:
        """Leave. What is under way is not to look for widgets that go away one by one."""
        self._leaving = True
        self.workers.cancel_all()
        super().exit(*arguments, **named)

    def _handle_exception(self, error: Exception) -> None:
        """An exception that nothing caught, in a worker, a message handler, a timer, a callback, a layout or a frame.

        Textual has no public hook for it: it calls this method, whose own way is to end the program. So it does here
        where the tests or a developer ask for that, or where there is no screen yet to go on with.
        """
        cause = error.error if isinstance(error, WorkerFailed) else error
        leaving = self._leaving or not self.is_running
        if leaving and isinstance(cause, NoMatches):
            return  # a message that was being handled while the screens closed
        if error_log.debugging():
            super()._handle_exception(error)
            return
        self.failures.take(cause)
        if not leaving and len(self.screen_stack) < 2:
            self.exit(return_code=Exit.DEFECT)

    def _callback_failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Of the event loop's callbacks and tasks that nobody waits for: what hears the host and the reader. What they
        meet while everything closes is no failure."""
        error = context.get("exception")
        if isinstance(error, Exception) and self.is_running and not self._leaving:
            self._handle_exception(error)

    def action_suspend_process(self) -> None:
        """Suspend the whole job, as the terminal's ctrl+z does: a script that has started this process too. The shell
        would wait for it otherwise. The terminal is left before: once the script has stopped, the shell has it back.
        SIGCONT brings the screens back (the driver's handler)."""
        driver = self._driver
        if driver is not None and driver.can_suspend:
            self._suspend_signal()
            driver.suspend_application_mode()
            os.killpg(os.getpgrp(), signal.SIGSTOP)
            self._resume_signal()

    def _end(self, number: int, _: FrameType | None) -> None:
        """SIGTERM, or the terminal was closed (SIGHUP). A signal handler, as the event loop may be the one that waits
        for a terminal which is gone."""
        last = threading.Timer(_ENDING[signal.Signals(number)], os._exit, (128 + number,))
        last.daemon = True
        last.start()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._leave, number)

    def _leave(self, number: int) -> None:
        # Not at the top: the home screen is painted before this is needed.
        from lockstep.workbench.tui.screens.workbench import WorkbenchScreen

        for screen in self.screen_stack:
            if isinstance(screen, WorkbenchScreen) and screen.driver.live and screen.driver.at is not None:
                self.recorded.append(Path(screen.driver.at.session))
        self.exit(return_code=128 + number)

    def on_setting_chosen(self, event: SettingChosen) -> None:
        """A screen's setting is kept."""
        self.keep(event.key, event.value)

    def on_home_screen_open(self, event: HomeScreen.Open) -> None:
        """The home screen has something to open."""
        found = event.found
        settings.remember(found.path)
        if found.kind == "session":
            self._push(routes.session(found.path))
        elif not found.needs_prompt:
            self._push(routes.demo())
        else:
            # Not at the top: the home screen is painted before this is needed.
            from lockstep.workbench.tui.screens.model_form import ModelChoice, ModelForm

            def chosen(choice: ModelChoice | None) -> None:
                if choice is not None:
                    self._push(routes.model(found, choice))

            self.push_screen(ModelForm(found), chosen)

    def _push(self, route: Route) -> None:
        self.push_screen(route(self.settings))
