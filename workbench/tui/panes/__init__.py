"""The panes. Each is imported when it is first shown: the first picture waits for one alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.tui.panes.base import Pane


def pane_class(number: int) -> type[Pane]:
    """The pane of that number."""
    from workbench.tui.panes.operations import OperationsPane

    return OperationsPane if number == OperationsPane.NUMBER else pane_classes()[number - 1]


def pane_classes() -> tuple[type[Pane], ...]:
    """All, in the order of their numbers."""
    from workbench.tui.panes.attention import AttentionPane
    from workbench.tui.panes.cache import CachePane
    from workbench.tui.panes.golden import GoldenPane
    from workbench.tui.panes.journal import JournalPane
    from workbench.tui.panes.logits import LogitsPane
    from workbench.tui.panes.operations import OperationsPane
    from workbench.tui.panes.sentinels import SentinelsPane
    from workbench.tui.panes.tensor import TensorPane
    from workbench.tui.panes.weights import WeightsPane

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
    )
