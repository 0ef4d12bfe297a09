"""The tokens on the workbench: a line a sequence of the branch, under that of the chosen one the branch that it is
compared with; and the timeline."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.sessions.errors import SessionError
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.tui.settings import TOKEN_COLOURS
from lockstep.workbench.tui.widgets.status_line import Fact
from lockstep.workbench.tui.widgets.step_timeline import StepTimeline
from lockstep.workbench.tui.widgets.token_strip import StripLine, TokenStrip
from lockstep.workbench.views.overview import Overview
from lockstep.workbench.views.sentinel_watch import Watch
from lockstep.workbench.views.token_line import TokenLine, TokenLines, compare
from lockstep.workbench.views.where import Where

#: What the colours of the tokens mean.
COLOURS = {
    "probability": "the clearer, the less likely the token was",
    "entropy": "the clearer, the less sure the choice was",
    "divergence": "the clearer, the farther from the golden reference, or from the other branch",
}

#: Sequences that have a line on a screen of at least so many lines.
_ROOM = ((60, 12), (30, 6), (0, 3))


class TokenRows:
    """Reads the tokens a little at a time and shows them in its widgets, which the screen mounts."""

    def __init__(self, reader: Reader, colour: str) -> None:
        self.reader, self.colour = reader, colour
        self.strip = TokenStrip(id="tokens")
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
        read = {where.seq: await self.reader.ask(self._lines.line, where.branch, where.seq, other)}
        shown = shown_sequences(list(overview.batch.fed) or [where.seq], where.seq, self._room())
        for seq in (seq for seq in shown if seq != where.seq):
            read[seq] = await self.reader.ask(self._lines.line, where.branch, seq, other)
        theirs = None if other is None else await self.reader.ask(self._lines.line, other, where.seq)
        self.line = read[where.seq]
        if not self.strip.is_attached:
            return True  # the screen was closed meanwhile
        both = None if theirs is None else compare(self.line, theirs)
        self.difference = (
            (Fact(f"first difference at step {both.first}", "wrong", drop=1),)
            if both is not None and both.first is not None
            else ()
        )
        lines = []
        for seq in shown:
            chosen = seq == where.seq
            tokens = both.ours if both is not None and chosen else read[seq]
            titles = [_title(overview, shown, seq)] if overview.batch.several else []
            if both is not None and chosen:
                titles.append(overview.branch(where.branch).name)
            lines.append(StripLine(tokens.tokens, tokens.at(where.step), " ".join(titles), seq, chosen))
            if both is not None and chosen and other is not None:
                at, name = both.theirs.at(where.step), overview.branch(other).name
                lines.append(StripLine(both.theirs.tokens, at, name, seq, chosen, led=True))
        self.strip.lines, self.strip.colour = tuple(lines), self.colour
        watch = await self._watch(where)
        self.timeline.show(self.line, where, self.colour, watch, overview.batch.label(where.seq))
        looked = watch is None or watch.scanned >= watch.total
        return looked and all(line.complete for line in (*read.values(), theirs) if line is not None)

    async def _watch(self, where: Where) -> Watch | None:
        """The sentinels, a little further; None where nothing shows them, or damage hides them (the pane states it)."""
        if not self.timeline.display:
            return None
        try:
            return await self.reader.ask(self.reader.sentinels.watch, where)
        except SessionError:
            return None

    def _room(self) -> int:
        """How many sequences have a line: what is below them needs the rest."""
        height = self.strip.app.size.height if self.strip.is_attached else 0
        return next(lines for least, lines in _ROOM if height >= least)


def shown_sequences(known: Sequence[int], chosen: int, room: int) -> Sequence[int]:
    """The sequences of which there is a line: as many as there is room for, the chosen one in their middle."""
    at = known.index(chosen) if chosen in known else 0
    first = max(0, min(at - room // 2, len(known) - room))
    return known[first : first + room]


def _title(overview: Overview, shown: Sequence[int], seq: int) -> str:
    """The sequence, and how many are out of sight beyond it."""
    known = list(overview.batch.fed)
    above, below = known.index(shown[0]), len(known) - 1 - known.index(shown[-1])
    more = f" ↑{above}" if above and seq == shown[0] else f" ↓{below}" if below and seq == shown[-1] else ""
    return f"seq {seq}{more}"
