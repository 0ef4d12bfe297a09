"""The outer net of the screens: an exception that nobody expected ends neither the program nor the part it came from.

It is reported in a notice and kept with its traceback in the log of errors. With `$LOCKSTEP_DEBUG` (which the tests
set) it ends the program with its traceback instead, as Textual has it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

from rich.segment import Segment
from textual.geometry import Region
from textual.message import Message
from textual.message_pump import MessagePump
from textual.strip import Strip
from textual.widget import Widget

from lockstep.engine.errors import panics_as_errors
from lockstep.engine.text import printable
from lockstep.workbench import error_log


class Guarded(MessagePump):
    """A screen, widget or app that goes on after a message that it could not handle.

    Textual reports the exception to the app and ends the message loop of what raised it, even where the app lives on:
    it would stay on screen and hear nothing. The public `on_event` sees neither messages nor the message loop's
    callbacks; all go through this one private method.
    """

    async def _dispatch_message(self, message: Message) -> None:
        try:
            with panics_as_errors():
                await super()._dispatch_message(message)
        except Exception as error:
            error.add_note(f"while {type(self).__name__} handled {type(message).__name__}")
            self.app._handle_exception(error)


class GuardedWidget(Guarded, Widget):
    """A widget that reports it where it cannot be drawn; what is around it is drawn."""

    def render_lines(self, crop: Region) -> list[Strip]:
        """The lines of `crop`, a region of the widget."""
        try:
            with panics_as_errors():
                return self.draw(crop)
        except Exception as error:
            error.add_note(f"while {type(self).__name__} was drawn")
            self.app._handle_exception(error)
            words = f" ✗ cannot be drawn: {type(error).__name__}: {printable(error)}"
            blank = Strip.blank(crop.width)
            first = Strip([Segment(words)]).crop(0, crop.width).adjust_cell_length(crop.width)
            return [first if y == 0 else blank for y in crop.line_range]

    def draw(self, crop: Region) -> list[Strip]:
        """What `render_lines` gives where nothing fails."""
        return super().render_lines(crop)


class FailureNotices:
    """What has failed so far. A failure is reported once until the user does something, and logged once: what cannot be
    drawn fails again with every frame, and the notice itself makes a frame."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._reported: set[str] = set()
        self._logged: dict[str, str] = {}

    def __len__(self) -> int:
        """How many different failures there were."""
        return len(self._logged)

    def forget(self) -> None:
        """The user has done something: what fails again is reported again."""
        self._reported.clear()

    def take(self, error: BaseException) -> None:
        """Log a failure and report on it."""
        last = traceback.extract_tb(error.__traceback__)[-1:]
        key = f"{type(error).__name__} {[(frame.filename, frame.lineno) for frame in last]}"
        if key not in self._logged:
            self._logged[key] = error_log.record(error, "the screens")
        if key not in self._reported:
            self._reported.add(key)
            doing = next(iter(getattr(error, "__notes__", ())), "")
            what = f"{type(error).__name__}: {printable(error, 200)} {doing}".rstrip()
            self._notify(
                f"{what}\nLockstep goes on, the session is unharmed. The traceback {self._logged[key]}"
            )
