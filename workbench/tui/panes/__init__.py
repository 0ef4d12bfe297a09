"""The panes in the order of their numbers."""

from workbench.tui.panes.attention import AttentionPane
from workbench.tui.panes.base import Pane
from workbench.tui.panes.cache import CachePane
from workbench.tui.panes.golden import GoldenPane
from workbench.tui.panes.journal import JournalPane
from workbench.tui.panes.logits import LogitsPane
from workbench.tui.panes.operations import OperationsPane
from workbench.tui.panes.sentinels import SentinelsPane
from workbench.tui.panes.weights import WeightsPane

PANES: tuple[type[Pane], ...] = (
    OperationsPane,
    AttentionPane,
    CachePane,
    WeightsPane,
    LogitsPane,
    SentinelsPane,
    GoldenPane,
    JournalPane,
)

#: Their titles, the number of the one that `golden` fills, and of the one that tells of alarms.
TITLES = tuple(pane.TITLE for pane in PANES)
GOLDEN, SENTINELS = GoldenPane.NUMBER, SentinelsPane.NUMBER
