"""The panes in the order of their numbers."""

from workbench.tui.panes.attention import AttentionPane
from workbench.tui.panes.base import Pane
from workbench.tui.panes.cache import CachePane
from workbench.tui.panes.golden import GoldenPane
from workbench.tui.panes.journal import JournalPane
from workbench.tui.panes.logits import LogitsPane
from workbench.tui.panes.operations import OperationsPane
from workbench.tui.panes.sentinels import SentinelsPane
from workbench.tui.panes.tensor import TensorPane
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
    TensorPane,
)

#: Their titles, and the numbers of those that `golden` fills, that tells of alarms, that shows one tensor.
TITLES = tuple(pane.TITLE for pane in PANES)
GOLDEN, SENTINELS, TENSOR = GoldenPane.NUMBER, SentinelsPane.NUMBER, TensorPane.NUMBER
