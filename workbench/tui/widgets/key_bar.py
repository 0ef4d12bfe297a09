"""The keys that act here, at the foot of the screen. Each can be clicked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.segment import Segment
from textual import events
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip

from lockstep.workbench.tui.widgets.painted import LineWidget


@dataclass(frozen=True, slots=True)
class KeyHint:
    """A key, what it does in a word, the key's name for `simulate_key`, and why it does nothing here ("" = it does)."""

    key: str
    label: str
    press: str
    why_not: str = ""


class KeyBar(LineWidget):
    """One line of hints; those that do not fit are left out, the last (`pinned`) ones never."""

    DEFAULT_CSS = "KeyBar { height: 1; width: 1fr; }"

    hints: reactive[tuple[KeyHint, ...]] = reactive(())
    pinned: reactive[tuple[KeyHint, ...]] = reactive(())

    @dataclass
    class Pressed(Message):
        """A hint was clicked: act as if its key had been pressed."""

        hint: KeyHint

    def show(self, hints: Sequence[KeyHint], pinned: Sequence[KeyHint] = ()) -> None:
        """Show these hints, `pinned` at the right edge."""
        self.hints, self.pinned = tuple(hints), tuple(pinned)

    def _laid_out(self) -> list[tuple[int, KeyHint]]:
        """Where each hint that fits begins."""
        pinned_width = sum(_width(hint) + 2 for hint in self.pinned)
        room = self.size.width - pinned_width
        placed, x = [], 1
        for hint in self.hints:
            if x + _width(hint) > room:
                break
            placed.append((x, hint))
            x += _width(hint) + 2
        x = max(x, room)
        for hint in self.pinned:
            placed.append((x, hint))
            x += _width(hint) + 2
        return placed

    def line(self, y: int) -> Strip:
        """Keys in the text's colour, their words quiet; both faint where they do nothing."""
        styles = self.paint
        segments: list[Segment] = []
        at = 0
        for x, hint in self._laid_out() if y == 0 else []:
            segments.append(Segment(" " * (x - at)))
            segments.append(Segment(hint.key, styles.faint if hint.why_not else styles.strong))
            segments.append(Segment(f" {hint.label}", styles.faint if hint.why_not else styles.quiet))
            at = x + _width(hint)
        return Strip(segments).adjust_cell_length(self.size.width)

    def on_click(self, event: events.Click) -> None:
        """Press the key that was clicked."""
        for x, hint in self._laid_out():
            if x <= event.x < x + _width(hint):
                self.post_message(self.Pressed(hint))


def _width(hint: KeyHint) -> int:
    return cell_len(hint.key) + 1 + cell_len(hint.label)
