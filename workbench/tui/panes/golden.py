"""Pane 7: the verdicts as a map of layers and operations, the figure over depth, the first divergence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from textual import on
from textual.containers import Container, Vertical
from textual.widget import Widget

from lockstep.engine.taps.names import count_layers, layer_of, local_name
from lockstep.workbench.export.table import Table
from lockstep.workbench.judgements.golden_event import compared_by
from lockstep.workbench.tui.drivers.port import CommandStage
from lockstep.workbench.tui.panes.base import Pane
from lockstep.workbench.tui.panes.golden_text import (
    error_curve,
    ledger_lines,
    legend,
    progress_lines,
    shown,
    tap_lines,
    verdict_lines,
)
from lockstep.workbench.tui.panes.titles import GOLDEN, titled
from lockstep.workbench.tui.widgets.key_bar import KeyHint
from lockstep.workbench.tui.widgets.text_block import TextBlock
from lockstep.workbench.tui.widgets.verdict_map import VerdictMap, VerdictRow
from lockstep.workbench.views.step_verdicts import JudgedStep, judged_step, operations_of


class GoldenPane(Pane):
    """Where the run left the golden reference."""

    NUMBER, TITLE, SHORT = titled(GOLDEN)
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
    EMPTY_KEYS = frozenset({"g", "o"})
    MODEL_KEYS = frozenset({"g"})
    DEFAULT_CSS = """
    GoldenPane > #progress { height: auto; padding: 1 1 0 1; display: none; }
    GoldenPane.-comparing > #progress { display: block; }
    GoldenPane.-bare > #split, GoldenPane.-bare > #legend, GoldenPane.-bare > #verdict { display: none; }
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
        self._stages: Sequence[CommandStage] = ()
        self._found = False  # a comparison has ended: the cursor goes to what it found
        self.add_class("-bare")

    def content(self) -> Iterable[Widget]:
        """How far a comparison has come; the verdict, the map, the depth, the tap under the cursor, what the marks
        mean."""
        yield TextBlock(id="progress")
        yield TextBlock(fold=True, id="verdict")
        yield Container(
            VerdictMap(id="map"),
            Vertical(TextBlock(id="depth"), TextBlock(fold=True, id="detail"), id="beside"),
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
        opened, self.snapshot = self.snapshot is None, snapshot
        if opened and (found := self._to_open_at(snapshot)) is not None:
            self.post_message(found)
        self.set_class(not snapshot.taps, "-bare")
        if not snapshot.taps:
            if self._stages:
                return
            others = ", ".join(map(str, snapshot.judged_steps[:12]))
            reported = f"\n\nJudged steps: {others}." if others else ""
            overview = self.overview
            check = f"{compared_by(overview.name)}  compares it" if overview and overview.engine else ""
            self.empty(
                f"Step {snapshot.step} was not compared with a golden reference.{reported}",
                "g  compares it",
                check,
            )
            return
        self.filled()
        assert self.overview is not None
        verdicts = self.query_one(VerdictMap)
        verdicts.rows = _map(self.overview.operations, snapshot)
        verdicts.point_at(self.where.tap)
        if self._found and snapshot.first is not None:
            self.post_message(self.Go(tap=snapshot.first.tap))
        self._found = False
        self.query_one("#legend", TextBlock).show([legend()])
        self._draw()

    def _to_open_at(self, snapshot: JudgedStep) -> Pane.Go | None:
        """The first wrong operation of a recording in which nobody has gone anywhere yet."""
        overview = self.overview
        if self.live or overview is None or snapshot.divergence is None:
            return None
        if self.where.tap or self.where.step + 1 < overview.branch(self.where.branch).steps:
            return None
        step, tap = snapshot.divergence
        return self.Go(step=step, tap=tap)

    def progress(self, stages: Sequence[CommandStage]) -> None:
        """Show it above the verdicts that there are, as long as a comparison runs; then what it has found."""
        if not stages and not self._stages:
            return
        self._stages = stages
        self.set_class(bool(stages), "-comparing")
        if stages:
            self.query_one("#progress", TextBlock).show(progress_lines(stages))
            self.filled()
        else:
            self._found = True
            self.again()

    def _draw(self) -> None:
        snapshot, overview = self.snapshot, self.overview
        assert snapshot is not None
        assert overview is not None
        verdict = verdict_lines(snapshot, len(overview.batch.fed), most=max(3, self.size.height // 5))
        self.query_one("#verdict", TextBlock).show(verdict)
        wide = self.size.width >= 66 + 3 * min(overview.layers, 32)
        self.query_one("#split").set_class(wide, "-wide")
        height = max(5, min(12, self.size.height - 26))
        plot = (height, self._beside() - 12) if wide else (2, self.size.width - 12)
        curve = error_curve(snapshot, *plot)
        self.query_one("#depth", TextBlock).show(curve)
        self.query_one("#beside").styles.width = self._beside() if wide else "1fr"
        tap = self.query_one(VerdictMap).tap
        reported = [] if tap is None else tap_lines(overview.taps[tap], snapshot.taps.get(tap), wide)
        taken = sum(map(len, (verdict, curve, reported, self._stages))) + 3  # two empty lines, and the legend
        room = self.size.height - taken
        self.query_one("#detail", TextBlock).show(
            [*reported, *(ledger_lines(snapshot, room) if wide else [])]
        )

    def on_resize(self) -> None:
        """What stands beside the map depends on the width."""
        if self.snapshot is not None and self.snapshot.taps:
            self._draw()

    def _beside(self) -> int:
        """What the map leaves to the figures beside it."""
        layers = self.overview.layers if self.overview is not None else 1
        return max(44, min(100, self.size.width - 26 - 3 * layers))

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
                "; ".join(f"{words}: {shown(value)}" for words, value in t.details),
            )
            for t in self.snapshot.taps.values()
        )
        return Table(
            f"golden, step {self.snapshot.step}", ("tap", "verdict", "error", "inherited", "detail"), rows
        )


def _map(taps: Sequence[tuple[int, str]], snapshot: JudgedStep) -> tuple[VerdictRow, ...]:
    """The rows of the map; a tap outside the layers has one cell."""
    names = tuple(name for _, name in taps)
    layers = count_layers(names)
    rows = {name: VerdictRow(name, (None,) * layers) for name in operations_of(tuple(names))}
    for index, name in taps:
        layer = layer_of(name)
        key = local_name(name)
        found = snapshot.taps.get(index)
        cells = list(rows[key].cells) or [None]
        cells[layer or 0] = (index, "absent" if found is None else found.judged.state)
        rows[key] = replace(rows[key], cells=(cells[0],) if layer is None else tuple(cells))
    return tuple(rows.values())
