"""The lines above the keys: what an action had to report, else what the pane in front shows, else what the step did."""

from __future__ import annotations

from rich.segment import Segment
from textual.geometry import Size
from textual.strip import Strip

from lockstep.workbench.tui.widgets.status_line import Fact, StatusLine
from lockstep.workbench.tui.widgets.text_block import TextLine, cut, folded

Facts = tuple[Fact, ...]

#: The most lines that a message takes; the rest of a longer one opens.
_MOST = 3
#: Stands at the end of what was cut.
_OPENS = " … enter: all of it"


class MessageLine(StatusLine):
    """The most urgent of its messages on the left; where two branches differ, or the step's figures, on the right. A
    message that is longer than a line goes on in the next ones."""

    DEFAULT_CSS = "MessageLine { height: auto; width: 1fr; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._message: Facts = ()
        self._story: Facts = ()
        self._step: tuple[Facts, Facts] = ((), ())
        self._difference: Facts = ()
        self._height = 1
        self.read = False  # it was opened

    def report(self, text: str, wrong: bool = False) -> None:
        """Show something about the last action, until the next place or pane."""
        mark = (Fact("✗", "wrong"),) if wrong else ()
        self._message = (*mark, Fact(text, "text"))
        self.read = False
        self._show()

    def forget(self) -> None:
        """What was reported belongs to the place before; it stays on screen until the next one was read."""
        self._message = ()

    def forget_story(self) -> None:
        """Another pane came to the front: what was shown goes at once, as the place may be the same."""
        self._message = self._story = ()
        self._show()

    def show_story(self, facts: Facts) -> None:
        """What the pane in front has to report."""
        self._story = facts
        self._show()

    def show_step(self, step: tuple[Facts, Facts], difference: Facts) -> None:
        """What the step did, and where its branch left the one that it is compared with."""
        self._step, self._difference = step, difference
        self._show()

    @property
    def full(self) -> str:
        """The message on screen, all of it."""
        return "  ".join(fact.text for fact in self.left)

    @property
    def is_cut(self) -> bool:
        """Whether there is more of it than is on screen, and nobody has opened it yet."""
        return not self.read and len(self._rows(self.size.width)) > self._height

    def _show(self) -> None:
        left, right = self._step
        self.show(self._message or self._story or left, self._difference or right)
        if self.is_attached and self._room_for(self.size.width) != self._height:
            self.refresh(layout=True)

    def _rows(self, width: int) -> list[TextLine]:
        """The message folded to the width."""
        paragraphs: list[list[tuple[str, str]]] = [[]]
        for index, fact in enumerate(self.left):
            first, *rest = fact.text.split("\n")
            paragraphs[-1].append(("  " * (index > 0) + first, fact.role))
            paragraphs += [[(line, fact.role)] for line in rest]
        return [row for line in paragraphs for row in folded(line, max(10, width - 2))]

    def _room_for(self, width: int) -> int:
        most = max(1, min(_MOST, self.screen.size.height // 8))
        return max(1, min(most, len(self._rows(width)))) if self._message or self._story else 1

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """As many lines as the message takes."""
        return self._room_for(width)

    def line(self, y: int) -> Strip:
        """One line of a message; what the step did takes one alone."""
        width = self.size.width
        self._height = self.size.height
        rows = self._rows(width)
        if len(rows) == 1:
            return super().line(y)
        if y >= len(rows):
            return Strip.blank(width)
        row: TextLine = rows[y]
        if y == self._height - 1 and len(rows) > self._height:
            shown = cut(row, max(4, width - 2 - len(_OPENS)))
            row = [*((text.removesuffix("…"), role) for text, role in shown), (_OPENS, "accent")]
        segments = [Segment(text, self.paint.style(role)) for text, role in row]
        return Strip([Segment(" "), *segments]).adjust_cell_length(width)

    async def on_click(self) -> None:
        """Open it."""
        await self.run_action("screen.view('open_message')")
