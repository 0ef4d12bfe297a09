"""Pane 7: the verdicts as a map of layers and operations, the figure over depth, the first divergence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from textual import on
from textual.containers import Container, Vertical
from textual.widget import Widget

from engine.taps.names import count_layers, layer_of, local_name
from workbench.export.table import Table
from workbench.tui.panes.base import Pane
from workbench.tui.widgets.key_bar import KeyHint
from workbench.tui.widgets.plot import curve, squeeze
from workbench.tui.widgets.text_block import TextBlock, TextLine
from workbench.tui.widgets.verdict_map import MARKS, VerdictMap, VerdictRow
from workbench.views.numbers import number, power
from workbench.views.sequences import of_all
from workbench.views.step_verdicts import GoldenTap, JudgedStep, judged_step, operations_of
from workbench.views.verdicts import JUDGED_WORDS, Judged, State

#: The error at which the plot begins: what is below is no error worth a line.
_LEAST = 1e-9
#: The most operations that the ledger lists.
_LISTED = 8


class GoldenPane(Pane):
    """Where the run left the golden reference."""

    NUMBER = 7
    TITLE = "Golden"
    UNDER_WAY = True  # a comparison runs the step again, to its end
    HELP = """\
Every tap of the step against the golden reference.

  ▪ right: within the noise of the dtype   █ wrong: the operation errs on right inputs
  ▫ suspect: somewhat above it             ▒ wrong input: it was wrong before the operation
  · not compared: the reference has no such tap

The figure beside or under the map is the error of each tap in the order of execution, on a logarithmic scale, with
the noise floor that it is held against; × is an error without a number, such as NaN.

  enter  the difference as a tensor     o  first divergence     g  compare
"""
    HINTS = (
        KeyHint("g", "compare", "g"),
        KeyHint("o", "first", "o"),
        KeyHint("enter", "difference", "enter"),
    )
    DEFAULT_CSS = """
    GoldenPane > #verdict { height: auto; margin-bottom: 1; }
    GoldenPane > #split { layout: vertical; height: 1fr; }
    GoldenPane > #split.-wide { layout: horizontal; }
    GoldenPane VerdictMap { height: 1fr; margin: 0 1; }
    GoldenPane #beside { height: 6; }
    GoldenPane > #legend { height: 1; padding: 0 1; }
    GoldenPane .-wide #beside { height: 1fr; }
    GoldenPane #depth { height: auto; padding: 0 1; }
    GoldenPane #detail { height: 1fr; padding: 1 1 0 1; }
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.snapshot: JudgedStep | None = None

    def content(self) -> Iterable[Widget]:
        """The verdict, the map, the depth, the tap under the cursor, what the marks mean."""
        yield TextBlock(fold=True, id="verdict")
        yield Container(
            VerdictMap(id="map"),
            Vertical(TextBlock(id="depth"), TextBlock(id="detail"), id="beside"),
            id="split",
        )
        yield TextBlock(id="legend")

    def question(self) -> tuple[Callable[..., JudgedStep], Sequence[object]]:
        """The verdicts of the present step."""
        return judged_step, ()

    def lacks(self) -> str:
        """The comparison itself."""
        return "golden"

    def answer(self, snapshot: JudgedStep) -> None:
        """Show them."""
        self.snapshot = snapshot
        if not snapshot.taps:
            others = ", ".join(map(str, snapshot.judged_steps[:12]))
            told = f"\n\nJudged steps: {others}." if others else ""
            self.empty(
                f"Step {snapshot.step} was not compared with a golden reference.{told}", "g  compares it"
            )
            return
        self.filled()
        assert self.overview is not None
        verdicts = self.query_one(VerdictMap)
        verdicts.rows = _map(self.overview.taps, snapshot)
        verdicts.point_at(self.where.tap)
        self.query_one("#legend", TextBlock).show([_legend()])
        self._draw()

    def _draw(self) -> None:
        snapshot, overview = self.snapshot, self.overview
        assert snapshot is not None
        assert overview is not None
        first = snapshot.first
        told = (
            (f"✗ first wrong: {first.name}", "wrong")
            if first
            else ("? inconclusive", "wrong")
            if snapshot.inconclusive
            else ("✓ matches the golden reference", "strong")
        )
        rest = f"   {_counted([tap.judged.state for tap in snapshot.taps.values()])}"
        if whole := of_all(len(overview.batch.fed)):
            rest += f"   each the worst {whole}"
        cause: list[TextLine] = (
            [[("cause  ", "quiet"), (snapshot.causes[0], "strong")]] if snapshot.causes else []
        )
        notes: list[TextLine] = [[("note   ", "quiet"), (note, "text")] for note in snapshot.notes]
        self.query_one("#verdict", TextBlock).show([[told, (rest, "quiet")], *cause, *notes])
        wide = self.size.width >= 66 + 3 * min(overview.layers, 32)
        self.query_one("#split").set_class(wide, "-wide")
        height = max(5, min(12, self.size.height - 26))
        depth = self._depth(height, self._beside() - 12) if wide else self._depth(2, self.size.width - 12)
        self.query_one("#depth", TextBlock).show(depth)
        self.query_one("#beside").styles.width = self._beside() if wide else "1fr"
        self.query_one("#detail", TextBlock).show([*self._detail(), *(self._ledger() if wide else [])])

    def on_resize(self) -> None:
        """What stands beside the map depends on the width."""
        if self.snapshot is not None and self.snapshot.taps:
            self._draw()

    def _beside(self) -> int:
        """What the map leaves to the figures beside it."""
        layers = self.overview.layers if self.overview is not None else 1
        return max(44, min(100, self.size.width - 26 - 3 * layers))

    def _depth(self, height: int, width: int) -> list[TextLine]:
        """The error of each tap in order, on a logarithmic scale."""
        assert self.snapshot is not None
        judged = [tap.judged for tap in self.snapshot.taps.values()]
        errors = squeeze([_level(_error(one)) for one in judged], max(20, width))
        floors = squeeze([_level(one.floor) for one in judged], max(20, width))
        known = [level for level in (*errors, *floors) if level is not None and math.isfinite(level)]
        labels = ["", *[""] * (height - 2), ""]
        if known:
            labels[0], labels[-1] = power(10 ** max(known)), power(10 ** min(known))
        drawn = curve(errors, floors, height)
        lines: list[TextLine] = [
            [(f"{label:>6} ", "quiet"), *line] for label, line in zip(labels, drawn, strict=True)
        ]
        head: TextLine = [("error of each tap", "quiet")]
        if any(floor is not None for floor in floors):
            head = [*head, ("   ⠂", "quiet"), (" noise floor", "quiet")]
        return [head, *lines]

    def _ledger(self) -> list[TextLine]:
        """The operations that err on right inputs, and how many only inherited what was wrong."""
        assert self.snapshot is not None
        failed = [tap for tap in self.snapshot.taps.values() if tap.judged.verdict == "fail"]
        own = [tap for tap in failed if not tap.judged.inherited]
        if not failed:
            return []
        many = "operation errs by itself" if len(own) == 1 else "operations err by themselves"
        head: TextLine = [
            (f"{len(own)} {many}", "wrong"),
            (f", {len(failed) - len(own)} inherited", "quiet"),
        ]
        left: list[TextLine] = [[(f"  and {len(own) - _LISTED} more", "quiet")]] if len(own) > _LISTED else []
        return [[], head, *(_entry(tap) for tap in own[:_LISTED]), *left]

    def _detail(self) -> list[TextLine]:
        """What the judge said of the tap under the cursor."""
        tap = self.query_one(VerdictMap).tap
        assert self.snapshot is not None
        assert self.overview is not None
        if tap is None:
            return []
        name = self.overview.taps[tap]
        found = self.snapshot.taps.get(tap)
        if found is None:
            return [[(name, "strong"), (f"   {JUDGED_WORDS['absent']}", "quiet")]]
        role = "wrong" if found.judged.verdict == "fail" else "text"
        head: TextLine = [(f"{name}   ", "strong"), (JUDGED_WORDS[found.judged.state], role)]
        if not self.query_one("#split").has_class("-wide"):
            flat = [
                piece
                for words, value in found.details
                for piece in ((f"   {words} ", "quiet"), (_shown(value), "text"))
            ]
            return [head, flat]
        return [
            head, *([(f"  {words:<24}", "quiet"), (_shown(value), "text")] for words, value in found.details)
        ]  # fmt: skip

    @on(VerdictMap.Pointed)
    def _pointed(self, event: VerdictMap.Pointed) -> None:
        event.stop()
        self._draw()
        self.post_message(self.Go(tap=event.tap))

    @on(VerdictMap.Chosen)
    def _chosen(self, event: VerdictMap.Chosen) -> None:
        event.stop()
        self.post_message(self.OpenTensor(event.tap))

    def first_wrong(self) -> int | None:
        """The tap of the first divergence."""
        return self.snapshot.first.tap if self.snapshot and self.snapshot.first else None

    def table(self) -> Table | None:
        """Every judged tap."""
        if self.snapshot is None or not self.snapshot.taps:
            return None
        rows = tuple(
            (
                t.name,
                t.judged.verdict,
                t.judged.figure,
                t.judged.inherited,
                "; ".join(f"{words}: {_shown(value)}" for words, value in t.details),
            )
            for t in self.snapshot.taps.values()
        )
        return Table(
            f"golden, step {self.snapshot.step}", ("tap", "verdict", "error", "inherited", "detail"), rows
        )


def _error(judged: Judged) -> float | None:
    """The figure of a tap; NaN where it is wrong in a way that has none."""
    return math.nan if judged.figure is None and judged.verdict == "fail" else judged.figure


def _level(figure: float | None) -> float | None:
    """On a logarithmic scale; what is not finite stays."""
    return figure if figure is None or not math.isfinite(figure) else math.log10(max(abs(figure), _LEAST))


def _counted(states: Sequence[State]) -> str:
    """How many there are of each."""
    told = ((state, states.count(state)) for state in JUDGED_WORDS)
    return "  ".join(f"{number} {JUDGED_WORDS[state]}" for state, number in told if number)


def _legend() -> TextLine:
    """What the marks of the map mean."""
    pairs = ((MARKS[state], words) for state, words in JUDGED_WORDS.items())
    return [piece for mark, words in pairs for piece in (mark, (f" {words}   ", "quiet"))]


def _shown(value: float | str) -> str:
    return number(value) if isinstance(value, float) else value


def _entry(tap: GoldenTap) -> TextLine:
    """A line of the ledger: the error on golden inputs where it is known, else the one of the run as it is."""
    judged = tap.judged
    figure = _error(judged) if judged.injected is None else judged.injected
    return [(f"  {tap.name:<28}", "text"), (number(figure), "wrong")]


def _map(taps: tuple[str, ...], snapshot: JudgedStep) -> tuple[VerdictRow, ...]:
    """The rows of the map; a tap outside the layers has one cell."""
    layers = count_layers(taps)
    rows = {name: VerdictRow(name, (None,) * layers) for name in operations_of(taps)}
    for index, name in enumerate(taps):
        layer = layer_of(name)
        key = local_name(name)
        found = snapshot.taps.get(index)
        cells = list(rows[key].cells) or [None]
        cells[layer or 0] = (index, "absent" if found is None else found.judged.state)
        rows[key] = replace(rows[key], cells=(cells[0],) if layer is None else tuple(cells))
    return tuple(rows.values())
