"""What there is to know about the present tap, beside the pane where there is room."""

from __future__ import annotations

from lockstep.sessions.records import STATISTICS
from lockstep.workbench.tui.widgets.sparkline import sparkline
from lockstep.workbench.tui.widgets.text_block import TextBlock, TextLine
from lockstep.workbench.views.operations import Operations
from lockstep.workbench.views.overview import Overview
from lockstep.workbench.views.sequences import of_all
from lockstep.workbench.views.verdicts import JUDGED_WORDS
from lockstep.workbench.views.where import Where
from lockstep.workbench.words.numbers import count, number


class Inspector(TextBlock):
    """All statistics of the present tap on every rank, its checksums, layout, verdict and past."""

    DEFAULT_CSS = "Inspector { width: 46; height: 1fr; padding: 0 1; }"

    def update(self, overview: Overview, where: Where, operations: Operations | None) -> None:
        """Show the tap at `where`."""
        if operations is None or operations.stats is None or where.tap >= len(overview.taps):
            self.show([[("nothing recorded here", "quiet")]])
            return
        name = overview.taps[where.tap]
        shown = range(min(overview.ranks, 4))
        lines: list[TextLine] = [
            [(name, "strong")],
            [(overview.layouts[where.tap], "quiet")],
            [],
            [(" " * 9, "quiet"), *((f"{f'rank {rank}':>9}", f"rank{rank % 4}") for rank in shown)],
        ]
        if operations.sequences > 1:
            lines[2:2] = [[(f"statistics {of_all(operations.sequences)}", "quiet")]]
        if not operations.has_passed(where.tap):
            lines[1:1] = [[(f"not yet in step {where.step}: of step {where.step - 1}", "accent")]]
        stats = operations.stats[where.tap]
        for column, statistic in enumerate(STATISTICS):
            values = [float(stats[rank, column]) for rank in shown]
            counted = statistic in ("nan", "inf", "zeros")
            wrong = statistic in ("nan", "inf") and any(value > 0 for value in values)
            texts = [count(value) if counted else number(value, 4) for value in values]
            lines.append(
                [
                    (f"{statistic:<9}", "quiet"),
                    *((f"{text:>9}", "wrong" if wrong else "text") for text in texts),
                ]
            )
        if operations.checksums is not None and operations.has_passed(where.tap):
            sums = [f"{int(value) & 0xFFFFFF:06x}" for value in operations.checksums[where.tap][list(shown)]]
            agreement = operations.agreement[where.tap]
            role = "wrong" if agreement == "≠" else "quiet"
            lines += [
                [("bits     ", "quiet"), *((f"{text:>9}", role) for text in sums), (f" {agreement}", role)]
            ]
        lines += [[], *self._past(where, operations), [], *_verdict(name, operations)]
        captured = name in operations.captured
        lines += [[], [("enter opens the tensor" if captured else "tensor not captured", "quiet")]]
        self.show(lines)

    def _past(self, where: Where, operations: Operations) -> list[TextLine]:
        past = operations.past_of(where.tap)
        if past is None:
            return []
        rows: list[TextLine] = []
        for statistic in ("rms", "absmax", "mean"):
            values = past[:, where.rank or 0, STATISTICS.index(statistic)]
            rows.append([(f"{statistic:<9}", "quiet"), (sparkline([float(v) for v in values]), "trace")])
        return rows


def _verdict(name: str, operations: Operations) -> list[TextLine]:
    judged = operations.judged.get(name)
    if judged is None:
        return [[("golden   ", "quiet"), (JUDGED_WORDS["absent"], "quiet")]]
    role = "wrong" if judged.verdict == "fail" else "text"
    figure = judged.reason if judged.figure is None else number(judged.figure)
    return [[("golden   ", "quiet"), (JUDGED_WORDS[judged.state], role), (f"  {figure}", "quiet")]]
