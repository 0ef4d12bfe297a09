"""The tokens on the workbench: the branch's, those of the branch that it is compared with under them, the timeline."""

from __future__ import annotations

from workbench.tui.reader import Reader
from workbench.tui.settings import TOKEN_COLOURS
from workbench.tui.widgets.status_line import Fact
from workbench.tui.widgets.step_timeline import StepTimeline
from workbench.tui.widgets.token_strip import TokenStrip
from workbench.views.overview import Overview
from workbench.views.token_line import TokenLine, TokenLines, compare
from workbench.views.where import Where

#: What the colours of the tokens mean.
COLOURS = {
    "probability": "the clearer, the less likely the token was",
    "entropy": "the clearer, the less sure the choice was",
    "divergence": "the clearer, the farther from the golden reference, or from the other branch",
}


class TokenRows:
    """Reads the tokens a little at a time and shows them in its widgets, which the screen mounts."""

    def __init__(self, reader: Reader, colour: str) -> None:
        self.reader, self.colour = reader, colour
        self.strip, self.beside = TokenStrip(id="tokens"), TokenStrip(id="other-tokens")
        self.timeline = StepTimeline(id="timeline")
        self.line = TokenLine()
        #: Where the branch left the one it is compared with.
        self.difference: tuple[Fact, ...] = ()
        #: The branch to compare with: None the one it was forked from, False none.
        self._chosen: int | bool | None = None
        #: The present branch, and the one that was left for it.
        self._present, self._left = -1, -1
        self._lines = TokenLines()

    def against(self, overview: Overview, where: Where) -> int | None:
        """The branch whose tokens stand under those of the present one: where it was forked from none, that from which
        one came back to it."""
        if self._chosen is False:
            return None
        if isinstance(self._chosen, int) and self._chosen != where.branch:
            return int(self._chosen)
        parent = overview.branch(where.branch).parent
        return self._left if parent is None and self._left >= 0 else parent

    def compare_next(self, overview: Overview, where: Where) -> bool:
        """Compare with the next other branch; after the last, with none. False: there is only one branch."""
        others = [branch.id for branch in overview.branches if branch.id != where.branch]
        now = self.against(overview, where)
        index = others.index(now) + 1 if now in others else 0
        self._chosen = others[index] if index < len(others) else False
        return bool(others)

    def next_colour(self) -> str:
        """Colour the tokens by something else."""
        self.colour = TOKEN_COLOURS[(TOKEN_COLOURS.index(self.colour) + 1) % len(TOKEN_COLOURS)]
        return self.colour

    async def read(self, overview: Overview, where: Where) -> bool:
        """Read a little more of the tokens and show them; whether that was all."""
        if where.branch != self._present:
            self._present, self._left = where.branch, self._present
        other = self.against(overview, where)
        self.line = await self.reader.ask(self._lines.line, where.branch, where.seq, other)
        if not self.strip.is_attached:
            return True  # the screen was closed meanwhile
        shown, complete = self.line, self.line.complete
        self.strip.colour = self.beside.colour = self.colour
        self.strip.screen.set_class(other is not None, "-comparing")
        self.difference, self.strip.title = (), ""
        if other is not None:
            theirs = await self.reader.ask(self._lines.line, other, where.seq)
            both = compare(self.line, theirs)
            shown, complete = both.ours, complete and theirs.complete
            self.beside.tokens, self.beside.at = both.theirs.tokens, both.theirs.at(where.step)
            self.beside.title, self.beside.leader = overview.branch(other).name, self.strip
            self.beside.refresh()
            self.strip.title = overview.branch(where.branch).name
            if both.first is not None:
                self.difference = (Fact(f"first difference at step {both.first}", "wrong", drop=1),)
        self.strip.tokens, self.strip.at = shown.tokens, shown.at(where.step)
        self.timeline.show(self.line, where, self.colour)
        return complete
