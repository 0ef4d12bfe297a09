"""Pane 5: the choice of the next token: candidates, their moves, margin and entropy, golden's beside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from textual.widget import Widget

from workbench.export.numbers import number
from workbench.tui.panes.base import Pane, Table
from workbench.tui.snapshots.logits import Candidate, Logits, logits
from workbench.tui.widgets.grid import Column, Grid, GridCell
from workbench.tui.widgets.key_bar import KeyHint
from workbench.tui.widgets.lines import Lines
from workbench.tui.widgets.sparkline import sparkline

_EIGHTHS = " ▏▎▍▌▋▊▉█"


class LogitsPane(Pane):
    """The top candidates of the present step."""

    NUMBER = 5
    TITLE = "Logits"
    HELP = """\
The candidates for the next token, by probability.

`was` is the candidate's place one step before. The margin is the first logit less the second: a margin
within the noise of the dtype is a tie, not a choice. With a golden reference, its place and probability
for the same candidate stand beside. The lines at the foot follow margin, entropy and probability of the
chosen token over the last steps.
"""
    HINTS = (KeyHint("g", "golden", "g"),)
    DEFAULT_CSS = """
    LogitsPane > #choice { height: 2; padding: 0 1 1 1; }
    LogitsPane > #history { height: 4; padding: 1 1 0 1; }
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: Logits | None = None

    def content(self) -> Iterable[Widget]:
        """The choice, the candidates, the last steps."""
        yield Lines(id="choice")
        yield Grid((), id="candidates")
        yield Lines(id="history")

    def question(self) -> tuple[Callable[..., Logits | None], Sequence[object]]:
        """The choice at the present step."""
        return logits, ()

    def answer(self, snapshot: Logits | None) -> None:
        """Show it."""
        self.snapshot = snapshot
        if snapshot is None or not snapshot.candidates:
            self.empty(
                f"No logits were recorded at step {self.where.step}.\n\nn  runs a step that records its top candidates"
            )
            return
        self.filled()
        self.query_one("#choice", Lines).show([_choice_line(snapshot)])
        self.query_one(Grid).show(
            len(snapshot.candidates), self._cells, columns=_columns(snapshot.has_golden)
        )
        names = ("margin ", "entropy", "p      ")
        self.query_one("#history", Lines).show(
            [
                [(f"{name}  ", "quiet"), (sparkline([h[i] for h in snapshot.history]), "trace")]
                for i, name in enumerate(names)
            ]
        )

    def _cells(self, index: int) -> list[GridCell]:
        assert self.snapshot is not None
        candidate = self.snapshot.candidates[index]
        chance = candidate.probability
        cells: list[GridCell] = [
            ("▸" if candidate.chosen else "", "accent"),
            (str(candidate.rank + 1), "quiet"),
            (candidate.label, "strong" if candidate.chosen else "text"),
            (str(candidate.token), "quiet"),
            (number(candidate.logit, 4), "text"),
            ("-" if chance is None else f"{chance:.4f}", "text"),
            ("" if chance is None else bar(chance, 20), "accent" if candidate.chosen else "trace"),
            (_move(candidate), "quiet"),
        ]
        if self.snapshot.has_golden:
            place, golden = candidate.golden_rank, candidate.golden_probability
            other = "-" if place is None else f"{place + 1}"
            figure = "" if golden is None else f"{golden:.4f}"
            cells += [(other, "wrong" if place != candidate.rank else "quiet"), (figure, "quiet")]
        return cells

    def table(self) -> Table | None:
        """The candidates."""
        if self.snapshot is None:
            return None
        rows = tuple(
            (c.rank + 1, c.token, c.label, c.logit, c.probability, c.chosen) for c in self.snapshot.candidates
        )
        return Table(
            f"logits of step {self.snapshot.step}", ("rank", "id", "token", "logit", "p", "chosen"), rows
        )


def _columns(golden: bool) -> list[Column]:
    columns = [
        Column("", 1),
        Column("", 3, right=True),
        Column("token", 14, flex=1),
        Column("id", 7, right=True, drop=2),
        Column("logit", 8, right=True),
        Column("p", 6, right=True),
        Column("", 20, drop=1),
        Column("was", 5, right=True),
    ]
    return [*columns, Column("golden", 6, right=True), Column("p", 6, right=True)] if golden else columns


def _choice_line(snapshot: Logits) -> list[GridCell]:
    how = "given" if snapshot.forced else "chosen"
    covered = f"{snapshot.covered:.1%} of the probability shown" if snapshot.covered is not None else ""
    return [
        (f"{how} ", "quiet"),
        (snapshot.emitted or "nothing", "strong"),
        ("   margin ", "quiet"),
        (number(snapshot.margin, 3), "text"),
        ("   entropy ", "quiet"),
        (number(snapshot.entropy, 3), "text"),
        (f"   {covered}", "quiet"),
    ]


def _move(candidate: Candidate) -> str:
    """Where the candidate came from."""
    if candidate.rank_before is None:
        return "new"
    moved = candidate.rank_before - candidate.rank
    return "·" if moved == 0 else f"{'↑' if moved > 0 else '↓'}{abs(moved)}"


def bar(share: float, width: int) -> str:
    """A bar of `width` cells at most, in eighths of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[part] if part else "")).ljust(width)
