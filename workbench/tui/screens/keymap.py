"""The keys of one workbench: those of the view at once, those of the commands as soon as the registry is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from textual import events
from textual.app import SystemCommand
from textual.screen import Screen

from engine.faults.catalogue import FAULTS
from workbench.debugger.core.registry import Command
from workbench.tui import keys
from workbench.tui.drivers.port import Driver
from workbench.tui.panes import TITLES
from workbench.tui.widgets.key_bar import KeyHint


class Keymap:
    """Binds the keys on a screen, which has an action of each."""

    def __init__(self, screen: Screen[None], driver: Driver) -> None:
        self.screen, self.driver = screen, driver
        self.commands: Sequence[Command] = ()
        self.keys = keys.keys_of(())
        self._early: list[str] = []

    async def load(self) -> None:
        """Learn the commands and bind their keys; those that were pressed meanwhile act now. CommandFailed."""
        self.commands = await self.driver.commands()
        self.keys, known = keys.keys_of(self.commands), self.keys
        for key in self.keys:
            if key not in known:
                self.screen._bindings.bind(
                    key.press, key.action, key.what, show=False, priority=key.press == "ctrl+c"
                )
        early, self._early = self._early, []
        for press in early:
            self.screen.app.simulate_key(press)

    def missed(self, event: events.Key) -> None:
        """A key that nothing took: it may be a command's whose keys are not known yet."""
        if not self.commands and event.is_printable:
            self._early.append(event.key)

    def why_not(self, press: str) -> str:
        """Why a key does nothing here; "" where it does."""
        needs_model = any(key.needs_model for key in self.keys if key.press == press)
        return self.driver.why_idle if needs_model and not self.driver.live else ""

    def hints(self, own: Iterable[KeyHint]) -> list[KeyHint]:
        """The footer: a pane's own hints, then the ones that every pane has."""
        own = tuple(own)
        taken = {hint.press for hint in own}
        rest = (hint for hint in keys.footer(self.keys) if hint.press not in taken)
        return [replace(hint, why_not=self.why_not(hint.press)) for hint in (*own, *rest)]

    def palette(self) -> Iterator[SystemCommand]:
        """Every pane, key, command and toggle as an entry of the palette. A command comes onto the `:` line, where its
        arguments are typed; enter carries it out. Toggles are found by what is typed, and not listed before."""
        for number, title in enumerate(TITLES, 1):
            yield SystemCommand(title, f"pane {number}", lambda n=number: self._act(f"view('pane', {n})"))
        for key in self.keys:
            if key.press not in ("ctrl+c", "colon"):
                told = f"{key.shown}   {self.why_not(key.press) or key.line}".rstrip()
                yield SystemCommand(key.what.capitalize(), told, lambda k=key: self._act(k.action))

        for one in self.commands:
            idle = self.driver.why_idle if one.engine and not self.driver.live else ""
            told = f"{one.help}   ({idle})" if idle else one.help
            yield SystemCommand(f":{one.usage}", told, lambda n=one.name: self._type(f"{n} "))
        for fault in FAULTS:
            line = f"toggle {fault.rule} {fault.value}"
            told = f":{line}   {fault.symptom}"
            yield SystemCommand(f"Toggle: {fault.title}", told, lambda ln=line: self._type(ln), False)

    def _type(self, line: str) -> None:
        """Open the `:` line with what can be sent, or gone on with."""
        self._act(f"view('command_line', {line!r})")

    def _act(self, action: str) -> None:
        """Carry out an action of the screen, once what is open over it has closed."""
        self.screen.app.call_later(self.screen.run_action, action)
