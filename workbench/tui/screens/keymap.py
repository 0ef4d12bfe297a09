"""The keys of one workbench: those of the view at once, those of the commands as soon as the registry is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from textual import events
from textual.app import SystemCommand
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import Input

from lockstep.workbench.debugger.core.registry import Command
from lockstep.workbench.settings import config_file
from lockstep.workbench.tui import keys
from lockstep.workbench.tui.drivers.port import Driver
from lockstep.workbench.tui.panes import pane_classes
from lockstep.workbench.tui.panes.titles import TITLES, digit
from lockstep.workbench.tui.widgets.key_bar import KeyHint


class Keymap:
    """Binds the keys on a screen, which has an action of each."""

    def __init__(self, screen: Screen[None], driver: Driver, chosen: Mapping[str, Sequence[str]]) -> None:
        self.screen, self.driver = screen, driver
        self.commands: Sequence[Command] = ()
        self._chosen = chosen  # by action, the user's keys
        self._bound: set[str] = set()
        #: Keys that were pressed before the commands were known, in turn; whether they still wait.
        self.early: list[events.Key] = []
        self._waits = True
        self._bind()

    @property
    def keys(self) -> tuple[keys.ScreenKey, ...]:
        """All keys of the workbench."""
        return self.user.keys

    @property
    def pane_keys(self) -> tuple[str, ...]:
        """The key of each pane as it is printed, "" for none."""
        return tuple(
            next((key.shown for key in self.keys if key.name == pane.name), "") for pane in keys.PANE_KEYS
        )

    def _bind(self) -> None:
        """Bind the keys of what is known."""
        self.user = keys.user_keys(self.commands, self._chosen, _taken() if self._chosen else {})
        bindings = self.screen._bindings
        for press in self._bound:
            bindings.key_to_bindings.pop(press, None)
        for key in self.keys:
            bindings.bind(key.press, key.action, key.what, show=False, priority=key.name == "interrupt")
        self._bound = {key.press for key in self.keys}

    async def load(self) -> None:
        """Learn the commands and bind their keys; those that were pressed meanwhile act now. CommandFailed."""
        try:
            self.commands = await self.driver.commands()
        finally:
            self._waits = False
        self._bind()
        if problems := self.user.problems:
            reported = "\n".join((f"{config_file()}, [keys]", *problems))
            self.screen.notify(reported, severity="warning", timeout=20)
        early, self.early = self.early, []
        for event in early:
            self.screen.app.post_message(event.copy())

    def holds(self, event: events.Key) -> bool:
        """Whether a key waits: it may be a command's, and those are not known yet; and none overtakes another."""
        typed = isinstance(self.screen.focused, Input)
        unknown = event.is_printable and event.key not in self._bound and not typed
        held = self._waits and (bool(self.early) or unknown) and not event.key.startswith("ctrl+")
        if held:
            self.early.append(event)
        return held

    def why_not(self, press: str) -> str:
        """Why a key does nothing here; "" where it does."""
        needs_model = any(key.needs_model for key in self.keys if key.press == press)
        return self.driver.why_idle if needs_model and not self.driver.live else ""

    def hints(self, own: Iterable[KeyHint]) -> list[KeyHint]:
        """The footer: a pane's own hints, then the ones that every pane has."""
        own = tuple(self.moved(hint) for hint in own)
        taken = {hint.press for hint in own}
        rest = (hint for hint in keys.footer(self.keys) if hint.press not in taken)
        return [replace(hint, why_not=self.why_not(hint.press)) for hint in (*own, *rest)]

    def moved(self, hint: KeyHint) -> KeyHint:
        """A hint of an action of the workbench with the key that the user has given it."""
        key = self.user.moved.get(hint.press)
        return hint if key is None else replace(hint, key=key.shown, press=key.press)

    def palette(self) -> Iterator[SystemCommand]:
        """Every pane, key, command and toggle as an entry of the palette. A command comes onto the `:` line, where its
        arguments are typed; enter carries it out. Toggles are found by what is typed, and not listed before."""
        for number, title in enumerate(TITLES, 1):
            reported = f"{self.pane_keys[number - 1]}   pane {digit(number)}".lstrip()
            yield SystemCommand(title, reported, lambda n=number: self._act(f"view('pane', {n})"))
        for key in self.keys:
            if key.press not in ("ctrl+c", "colon") and not key.name.startswith("pane-"):
                reported = f"{key.shown}   {self.why_not(key.press) or key.line}".rstrip()
                yield SystemCommand(key.what.capitalize(), reported, lambda k=key: self._act(k.action))

        for one in self.commands:
            idle = self.driver.why_idle if one.engine and not self.driver.live else ""
            reported = f"{one.help}   ({idle})" if idle else one.help
            yield SystemCommand(f":{one.usage}", reported, lambda n=one.name: self._type(f"{n} "))
        from lockstep.engine.faults.catalogue import FAULTS  # here: the first paint waits for no fault

        for fault in FAULTS:
            line = f"toggle {fault.seam} {fault.value}"
            reported = f":{line}   {fault.symptom}"
            yield SystemCommand(f"Toggle: {fault.title}", reported, lambda ln=line: self._type(ln), False)

    def _type(self, line: str) -> None:
        """Open the `:` line with what can be sent, or gone on with."""
        self._act(f"view('command_line', {line!r})")

    def _act(self, action: str) -> None:
        """Carry out an action of the screen, once what is open over it has closed."""
        self.screen.app.call_later(self.screen.run_action, action)


def _taken() -> dict[str, str]:
    """The keys that the user cannot give to anything else: those of the panes, of tables and of the program."""
    of_all = (
        "enter",
        "escape",
        "tab",
        "shift+tab",
        "up",
        "down",
        "left",
        "right",
        "pageup",
        "pagedown",
        "home",
        "end",
    )
    found = dict.fromkeys((*of_all, "ctrl+q", "ctrl+p", "ctrl+z"), "the program")
    for pane in pane_classes():
        for binding in Binding.make_bindings(pane.BINDINGS):
            found.setdefault(binding.key, f"the {pane.TITLE} pane")
    return found
