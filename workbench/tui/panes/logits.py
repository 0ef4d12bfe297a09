"""Pane 5: the choice of the next token: candidates beside golden's, and what each layer would have chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from textual import events, on, work
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.reactive import reactive
from textual.widget import Widget

from lockstep.workbench.export.table import Table
from lockstep.workbench.tui.panes.base import Pane
from lockstep.workbench.tui.panes.followed import history_lines, move, recent_lines
from lockstep.workbench.tui.panes.lens import LENS_COLUMNS, lens_cells, lens_line, lens_table
from lockstep.workbench.tui.panes.titles import LOGITS, titled
from lockstep.workbench.tui.theme import paint
from lockstep.workbench.tui.widgets.grid import Grid, GridCell, GridColumn
from lockstep.workbench.tui.widgets.key_bar import KeyHint
from lockstep.workbench.tui.widgets.text_block import TextBlock
from lockstep.workbench.views.candidate_history import CandidateHistory, candidate_history
from lockstep.workbench.views.lens import Lens, lens
from lockstep.workbench.views.logits import Logits, logits
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where
from lockstep.workbench.words.numbers import chance, number
from lockstep.workbench.words.plain_text import finite

_EIGHTHS = " ▏▎▍▌▋▊▉█"
#: Cells from which the candidates and the lens stand side by side.
_BOTH = 116
#: Lines of the choice, of the header of the candidates, and between those and the history.
_AROUND = 4


class LogitsPane(Pane):
    """The top candidates of the present step, and the logit lens over the layers."""

    NUMBER, TITLE, SHORT = titled(LOGITS)
    OF_SEQUENCE = True
    HELP = """\
The candidates for the next token, by probability.

`was` is the candidate's rank at the step before and its move since: "4 ▲3" was the fourth. enter follows a
candidate over all steps: its probability and its rank wherever it was among those recorded. The margin is the
first logit less the second: a margin within the noise of the dtype is a tie, not a choice. With a golden
reference, its place and probability for the same candidate stand beside. The lines at the foot follow margin,
entropy and probability of the chosen token over the last steps.

The logit lens takes the residual of the last position after each layer and asks what the final norm and the
output head would make of it: three candidates a layer, the darker the surer, the place of the token that was
chosen in the end, and what golden's residual would have chosen. It is reckoned on demand and kept in the session.

  l      the logit lens         enter  a candidate over the steps; a layer's residual
  esc    follow it no more
"""
    HINTS = (KeyHint("enter", "follow", "enter"), KeyHint("l", "lens", "l"), KeyHint("g", "golden", "g"))
    EMPTY_KEYS = frozenset({"g"})
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "lens", "Logit lens"),
    ]
    DEFAULT_CSS = """
    LogitsPane > #choice { height: auto; min-height: 2; max-height: 5; padding: 0 1 1 1; }
    LogitsPane > #both { height: 1fr; }
    LogitsPane #lens { display: none; margin-left: 2; }
    LogitsPane.-lens #lens, LogitsPane.-both #lens { display: block; }
    LogitsPane.-lens #candidates { display: none; }
    LogitsPane.-both #candidates { display: block; }
    LogitsPane > #history { height: auto; padding: 1 1 0 1; }
    """

    shows_lens: reactive[bool] = reactive(False)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: Logits | None = None
        self.lens: Lens | None = None
        self.followed: CandidateHistory | None = None

    def content(self) -> Iterable[Widget]:
        """The choice, the candidates, the layers, the last steps."""
        yield TextBlock(fold=True, id="choice")
        yield Horizontal(Grid((), id="candidates"), Grid(LENS_COLUMNS, id="lens"), id="both")
        yield TextBlock(id="history")

    def question(self) -> tuple[Callable[..., tuple[Logits | None, Lens]], Sequence[object]]:
        """The choice at the present step."""
        return _both, ()

    def lacks(self) -> str:
        """The lens of this step."""
        return "lens"

    def answer(self, snapshot: tuple[Logits | None, Lens]) -> None:
        """Show it."""
        found, self.lens = snapshot
        self.snapshot = found
        if found is None or not found.candidates:
            self.empty(
                f"No logits were recorded at step {self.where.step}.",
                "n  runs a step that records its top candidates",
            )
            return
        self.filled()
        self.query_one("#candidates", Grid).show(
            len(found.candidates), self._cells, columns=_columns(found.has_golden)
        )
        self._lay_out()
        self._report_history()
        if self.followed is not None:
            self._follow(self.followed.token)

    def _report_history(self) -> None:
        """The last steps' choices, or a candidate over all steps."""
        found, block = self.snapshot, self.query_one("#history", TextBlock)
        if found is None:
            return
        width = self.size.width - 2
        rows = max(len(found.candidates), len(self.lens.layers) if self.lens is not None else 0)
        spare = self.size.height - rows - _AROUND
        if self.followed is None:
            block.show(recent_lines(found.history, width, spare))
        else:
            high = 9 if self.size.height > 24 else 7
            block.show(history_lines(self.followed, self.where.step, width, max(high, spare)))

    @work(exclusive=True, group="follow")
    async def _follow(self, token: int) -> None:
        """Read a candidate over the steps, a part at a time."""
        complete = False
        while not complete:
            found = await self.reader.ask(candidate_history, self.where, token, self.followed)
            self.followed, complete = found, found.complete
            self._report_history()

    def _lay_out(self) -> None:
        """The lens beside the candidates, or in their place."""
        found, layers = self.snapshot, self.lens
        if found is None or layers is None:
            return
        self.set_class(self.shows_lens, "-lens")
        self.set_class(self.size.width >= _BOTH and bool(layers.layers or self.shows_lens), "-both")
        grid = self.query_one("#lens", Grid)
        if layers.layers:
            grid.show(
                len(layers.layers),
                lambda row: lens_cells(layers.layers[row], layers.emitted is not None, paint(self.app)),
            )
        else:
            lacks, key = ("not yet there", "l looks") if self.live else ("not recorded", "")
            grid.show(1, lambda row: [("", "quiet"), (lacks, "quiet"), (key, "text")])
        line = (
            [] if self.shows_lens and not self.has_class("-both") and layers.layers else _choice_line(found)
        )
        if layers.layers and (self.shows_lens or self.has_class("-both")):
            line += lens_line(found, layers)
        self.query_one("#choice", TextBlock).show([line])

    def _cells(self, index: int) -> list[GridCell]:
        assert self.snapshot is not None
        ranked = self.snapshot.candidates[index]
        candidate, share = ranked.candidate, ranked.candidate.probability
        broken = "wrong" in (_role(candidate.logit), _role(share))
        cells: list[GridCell] = [
            ("▸" if candidate.chosen else "", "accent"),
            (str(ranked.rank + 1), "quiet"),
            (candidate.label, "strong" if candidate.chosen else "text"),
            (str(candidate.token), "quiet"),
            (number(candidate.logit, 4), _role(candidate.logit)),
            (chance(share), _role(share)),
            (bar(share, 20), "accent" if candidate.chosen else "trace"),
            ("" if broken else move(ranked.rank, ranked.rank_before), "quiet"),
        ]
        if self.snapshot.has_golden:
            place, golden = ranked.golden_rank, ranked.golden_probability
            other = "-" if place is None else f"{place + 1}"
            figure = "" if golden is None else chance(golden)
            cells += [(other, "wrong" if place != ranked.rank else "quiet"), (figure, "quiet")]
        return cells

    def on_resize(self, event: events.Resize) -> None:
        """There may be room for both now, or no more; what the candidates leave is the history's."""
        self._lay_out()
        self._report_history()

    def action_lens(self) -> None:
        """Show the lens, have it reckoned where it is not yet, or go back to the candidates."""
        if self.lens is None:
            return
        if not self.lens.layers:
            self.shows_lens = True
            self.post_message(self.Command("lens"))
        else:
            self.shows_lens = not self.shows_lens
        self._lay_out()
        self.focus_content()

    @on(Grid.Chosen, "#candidates")
    def _candidate_chosen(self, event: Grid.Chosen) -> None:
        event.stop()
        if self.snapshot is not None and event.row < len(self.snapshot.candidates):
            token = self.snapshot.candidates[event.row].candidate.token
            if self.followed is not None and self.followed.token == token:
                self.action_back()
            else:
                self._follow(token)

    def action_back(self) -> None:
        """The last steps' figures again."""
        self.followed = None
        self.workers.cancel_group(self, "follow")
        self._report_history()

    @on(Grid.Chosen, "#lens")
    def _layer_chosen(self, event: Grid.Chosen) -> None:
        event.stop()
        taps = self.overview.taps if self.overview else ()
        if (
            self.lens is not None
            and event.row < len(self.lens.layers)
            and self.lens.layers[event.row].tap in taps
        ):
            self.post_message(self.OpenTensor(taps.index(self.lens.layers[event.row].tap)))

    def table(self) -> Table | None:
        """The layers where they are shown alone, else the candidates."""
        if self.snapshot is None:
            return None
        if self.shows_lens and self.lens is not None and self.lens.layers:
            return lens_table(self.lens)
        rows = tuple(
            (
                one.rank + 1, c.token, c.label, c.logit, c.probability, c.chosen,
                None if one.golden_rank is None else one.golden_rank + 1, one.golden_probability,
            )
            for one in self.snapshot.candidates
            for c in (one.candidate,)
        )  # fmt: skip
        columns = ("rank", "id", "token", "logit", "p", "chosen", "golden rank", "golden p")
        return Table(f"logits of step {self.snapshot.step}", columns, rows)


def _both(source: SessionSource, where: Where) -> tuple[Logits | None, Lens]:
    return logits(source, where), lens(source, where)


def _columns(golden: bool) -> list[GridColumn]:
    columns = [
        GridColumn("", 1),
        GridColumn("", 3, right=True),
        GridColumn("token", 14, flex=1),
        GridColumn("id", 7, right=True, drop=2),
        GridColumn("logit", 8, right=True),
        GridColumn("p", 12, right=True),
        GridColumn("", 20, drop=1),
        GridColumn("was", 7, right=True),
    ]
    return (
        [*columns, GridColumn("golden", 6, right=True), GridColumn("p", 12, right=True)]
        if golden
        else columns
    )


def _choice_line(snapshot: Logits) -> list[GridCell]:
    how = "given" if snapshot.forced else "chosen"
    share = snapshot.covered
    covered = "" if share is None or not finite(share) else f"shown p {chance(share)} in all"
    return [
        (f"{how} ", "quiet"),
        (snapshot.emitted or "nothing", "strong"),
        ("   margin ", "quiet"),
        (number(snapshot.margin, 3), _role(snapshot.margin)),
        ("   entropy ", "quiet"),
        (number(snapshot.entropy, 3), _role(snapshot.entropy)),
        (f"   {covered}   " if covered else "   ", "quiet"),
    ]


def _role(figure: float | None) -> str:
    return "text" if figure is None or finite(figure) else "wrong"


def bar(share: float | None, width: int) -> str:
    """A bar of `width` cells at most, in eighths of a cell; empty for what is no number."""
    if share is None or not math.isfinite(share):
        return ""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[part] if part else "")).ljust(width)
