"""The panes. Each is imported when it is first shown: the first picture waits for one alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.workbench.tui.panes.base import Pane


def pane_class(number: int) -> type[Pane]:
    """The pane of that number."""
    from lockstep.workbench.tui.panes.operations import OperationsPane

    return OperationsPane if number == OperationsPane.NUMBER else pane_classes()[number - 1]


def pane_classes() -> tuple[type[Pane], ...]:
    """All, in the order of their numbers."""
    from lockstep.workbench.tui.panes.attention import AttentionPane
    from lockstep.workbench.tui.panes.cache import CachePane
    from lockstep.workbench.tui.panes.experts import ExpertsPane
    from lockstep.workbench.tui.panes.golden import GoldenPane
    from lockstep.workbench.tui.panes.journal import JournalPane
    from lockstep.workbench.tui.panes.logits import LogitsPane
    from lockstep.workbench.tui.panes.operations import OperationsPane
    from lockstep.workbench.tui.panes.sentinels import SentinelsPane
    from lockstep.workbench.tui.panes.tensor import TensorPane
    from lockstep.workbench.tui.panes.weights import WeightsPane

    return (
        OperationsPane,
        AttentionPane,
        CachePane,
        WeightsPane,
        LogitsPane,
        SentinelsPane,
        GoldenPane,
        JournalPane,
        TensorPane,
        ExpertsPane,
    )
