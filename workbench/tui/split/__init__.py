"""The parts of the split view: two branches, or a branch and its golden reference, beside each other."""

from workbench.tui.split.attention import SplitAttention
from workbench.tui.split.logits import SplitLogits
from workbench.tui.split.operations import SplitOperations
from workbench.tui.split.part import SplitPart
from workbench.tui.split.tensor import SplitTensor

#: In the order of their keys, from 1.
PARTS: tuple[type[SplitPart], ...] = (SplitOperations, SplitAttention, SplitLogits, SplitTensor)
OPERATIONS, ATTENTION, LOGITS, TENSOR = range(1, 5)
#: The part that opens from a pane, by the pane's number, where it is not the operations.
PART_OF_PANE = {2: ATTENTION, 5: LOGITS, 9: TENSOR}
