"""The head of the split view: what stands beside what, both strips of tokens, an arrow at the first that differs."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult

from lockstep.workbench.tui.split.mark import DifferenceMark
from lockstep.workbench.tui.widgets.painted import PaintedWidget
from lockstep.workbench.tui.widgets.status_line import Fact, StatusLine
from lockstep.workbench.tui.widgets.token_strip import StripLine, TokenStrip
from lockstep.workbench.views.sides import SidesTokens


class SplitHeader(PaintedWidget):
    """Four lines. The strips scroll together."""

    DEFAULT_CSS = "SplitHeader { height: 4; width: 1fr; layout: vertical; }"

    def __init__(self) -> None:
        super().__init__(id="head")
        self.title, self.strip = StatusLine(id="title"), TokenStrip(id="sides")
        self.mark = DifferenceMark(self.strip, id="mark")

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        yield from (self.title, self.strip, self.mark)

    def show(
        self, tokens: SidesTokens, step: int, names: tuple[str, str], right: Sequence[Fact], *, golden: bool
    ) -> None:
        """Show both sides at a step. `golden`: theirs are a reference's own choices."""
        lines = (tokens.pair.ours, tokens.pair.theirs)
        self.strip.lines = tuple(
            StripLine(line.tokens, line.at(step), name, led=line is lines[1])
            for line, name in zip(lines, names, strict=True)
        )
        self.strip.refresh()
        self.mark.cell = None if tokens.parted is None else lines[0].at(tokens.parted)
        self.mark.words = _difference(tokens, golden=golden)
        self.mark.refresh()
        last = [line.tokens.cells[-1].step for line in lines if line.tokens.cells]
        ends = " and ".join(str(end) for end in dict.fromkeys(last) if end is not None)
        self.title.show(
            [
                Fact(names[0], "strong"), Fact("beside", "quiet", drop=3), Fact(names[1], "strong"),
                Fact(f"step {step}", "accent"), Fact(f"of {ends}" if ends else "", "quiet", drop=2),
            ],
            [fact for fact in right if fact.text],
        )  # fmt: skip


def _difference(tokens: SidesTokens, *, golden: bool) -> str:
    """The first different token in words; that there is none, as far as both go."""
    parted = tokens.parted
    if parted is None:
        return "same tokens as far as both go" if tokens.complete else "reading the tokens …"
    labels = []
    for line in (tokens.pair.ours, tokens.pair.theirs):
        at = line.at(parted)
        labels.append("" if at is None else line.tokens.cells[at].label.rstrip())
    return f"step {parted}: first difference, “{labels[0]}” and {'golden’s ' if golden else ''}“{labels[1]}”"
