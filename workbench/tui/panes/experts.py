"""Pane 0: the experts of a layer: the load of each, and where each token of the step went."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.events import Resize
from textual.reactive import reactive
from textual.widget import Widget

from lockstep.workbench.export.table import Table
from lockstep.workbench.tui.panes.base import Pane
from lockstep.workbench.tui.panes.experts_text import (
    EXPERT_COLUMNS,
    TOKEN_COLUMNS,
    about,
    expert_cells,
    token_cells,
    under_cursor,
)
from lockstep.workbench.tui.panes.titles import EXPERTS, titled
from lockstep.workbench.tui.widgets.grid import Grid, GridCell
from lockstep.workbench.tui.widgets.key_bar import KeyHint
from lockstep.workbench.tui.widgets.status_line import Fact
from lockstep.workbench.tui.widgets.text_block import TextBlock
from lockstep.workbench.views.experts import CHOSEN, ROUTER, LayerExperts, experts

#: From this width on the experts and the tokens stand side by side.
_BOTH = 112
#: What has a further recording hold them.
_RECORDED = f"Record with --capture 'layers.*.{CHOSEN[:-3]}*' --capture 'layers.*.{ROUTER}' to see them."


class ExpertsPane(Pane):
    """Experts by load, tokens by what they chose."""

    NUMBER, TITLE, SHORT = titled(EXPERTS)
    OF_SEQUENCE = True
    UNDER_WAY = True
    HELP = """\
Which experts the tokens of the step went to in one layer of a mixture of experts.

An expert a row: the rank that holds it (several where it is cut over them), the tokens that went to it, its share of
all choices with a bar to the busiest, and the sum of its weights. In a batch that is of all sequences of the step.

A token a row, of the chosen sequence: its experts, and the margin, the least router logit of a chosen expert less the
largest of any other. A margin within the noise of the dtype is a tie, and another engine may choose otherwise. Tokens
of the expert under the cursor are marked. What is wrong stands at the right: an id of no expert, an expert twice, fewer
experts than there are slots, a weight that is no number; where golden has others, its experts. At the foot: the token
under the cursor with weights and logits.

  m    experts or tokens             , .  previous, next layer
"""
    HINTS = (
        KeyHint("m", "experts, tokens", "m"),
        KeyHint(", .", "layer", "full_stop"),
        KeyHint("g", "golden", "g"),
    )
    EMPTY_KEYS = frozenset({"full_stop"})
    BINDINGS: ClassVar[list[BindingType]] = [Binding("m", "mode", "Experts or tokens")]
    DEFAULT_CSS = """
    ExpertsPane > #lists { height: 1fr; padding: 0 1; }
    ExpertsPane #tokens { display: none; }
    ExpertsPane.-tokens #tokens, ExpertsPane.-both #tokens { display: block; }
    ExpertsPane.-tokens #experts { display: none; }
    ExpertsPane.-both #experts { display: block; margin-right: 2; }
    ExpertsPane > TextBlock { height: auto; max-height: 6; }
    """

    shows_tokens: reactive[bool] = reactive(False)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: LayerExperts | None = None

    def content(self) -> Iterable[Widget]:
        """Of what layer it is, experts and tokens, the token under the cursor."""
        yield TextBlock(fold=True, id="about")
        yield Horizontal(Grid(EXPERT_COLUMNS, id="experts"), Grid(TOKEN_COLUMNS, id="tokens"), id="lists")
        yield TextBlock(fold=True, id="under")

    def question(self) -> tuple[Callable[..., LayerExperts], Sequence[object]]:
        """The layer of the present operation, or the one that has just passed."""
        return experts, ()

    def lacks(self) -> str:
        """The choice of the layer, where the model makes one."""
        captures = self.snapshot.captures if self.snapshot is not None else ()
        return f"capture {' '.join(captures)}" if captures else ""

    def answer(self, snapshot: LayerExperts) -> None:
        """Show the layer."""
        before, self.snapshot = self.snapshot, snapshot
        self.shows(snapshot.step)
        if snapshot.choices is None:
            fills = f"a  captures them (:{self.lacks()})" if snapshot.captures else ""
            self.empty(snapshot.missing, fills, _RECORDED)
            return
        self.filled()
        tokens = self.query_one("#tokens", Grid)
        known = before is not None and before.choices is not None
        at_end = not known or tokens.cursor >= tokens.count - 1
        self._draw()
        if at_end:  # on the newest token: it stays there
            tokens.cursor = len(snapshot.choices) - 1
        self._report_cursor()

    def _draw(self) -> None:
        found = self.snapshot
        if found is None or found.choices is None:
            return
        both = self.size.width >= _BOTH
        self.set_class(self.shows_tokens and not both, "-tokens")
        self.set_class(both, "-both")
        largest = max((load.share for load in found.loads), default=0.0)
        loads = found.loads
        self.query_one("#experts", Grid).show(len(loads), lambda row: expert_cells(loads[row], largest))
        self.query_one("#tokens", Grid).show(len(found.choices), self._token_cells)
        golden = found.choices.golden is not None
        self.query_one("#about", TextBlock).show(about(found, golden, self.size.width - 2))
        self._report_cursor()

    def _token_cells(self, row: int) -> list[GridCell]:
        assert self.snapshot is not None
        assert self.snapshot.choices is not None
        return token_cells(
            self.snapshot.choices.token(row), self.query_one("#experts", Grid).cursor, self.label
        )

    def _report_cursor(self) -> None:
        """The token under the cursor."""
        found = self.snapshot
        if found is not None and found.choices is not None:
            row = min(self.query_one("#tokens", Grid).cursor, len(found.choices) - 1)
            self.query_one("#under", TextBlock).show(
                under_cursor(found, row, self.label, self.size.width - 2)
            )

    def on_resize(self, event: Resize) -> None:
        """There may be room for both now, or no more."""
        self._draw()

    @on(Grid.Pointed, "#experts")
    def _expert_pointed(self, event: Grid.Pointed) -> None:
        event.stop()
        self.query_one("#tokens", Grid).refresh()  # others are marked

    @on(Grid.Pointed, "#tokens")
    def _token_pointed(self, event: Grid.Pointed) -> None:
        event.stop()
        self._report_cursor()

    def watch_line(self) -> None:
        """The tokens came in: name them."""
        self._draw()

    def focus_content(self) -> None:
        """Give the keys to the list that is chosen."""
        if self.has_class("-empty"):
            super().focus_content()
        else:
            self.query_one("#tokens" if self.shows_tokens else "#experts", Grid).focus()

    def action_mode(self) -> None:
        """The experts, or the tokens."""
        self.shows_tokens = not self.shows_tokens
        self._draw()
        self.focus_content()
        self.post_message(self.Report((Fact("tokens" if self.shows_tokens else "experts"),)))

    def table(self) -> Table | None:
        """The list that has the keys: experts, or tokens."""
        found = self.snapshot
        if found is None or found.choices is None:
            return None
        title = f"layer {found.layer}, step {found.step}"
        if not self.shows_tokens:
            rows = tuple(
                (one.expert, " ".join(map(str, one.ranks)), one.tokens, one.share, one.weight)
                for one in found.loads
            )
            return Table(f"experts, {title}", ("expert", "ranks", "tokens", "share", "weight"), rows)
        tokens = map(found.choices.token, range(len(found.choices)))
        lines = tuple(
            (
                one.position,
                self.label(one.position),
                " ".join(f"{item.number:g}" for item in one.chosen),
                " ".join("" if item.weight is None else f"{item.weight:.6g}" for item in one.chosen),
                " ".join("" if item.logit is None else f"{item.logit:.6g}" for item in one.chosen),
                one.margin,
                "; ".join(one.flaws),
                None if one.golden is None else " ".join(f"{number:g}" for number in one.golden),
            )
            for one in tokens
        )
        columns = ("position", "token", "experts", "weights", "logits", "margin", "wrong", "golden")
        return Table(f"tokens and their experts, {title}", columns, lines)
