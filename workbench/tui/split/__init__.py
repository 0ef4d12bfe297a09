"""The parts of the split view: two branches, or a branch and its golden reference, beside each other."""

from lockstep.workbench.tui.split.attention import SplitAttention
from lockstep.workbench.tui.split.logits import SplitLogits
from lockstep.workbench.tui.split.operations import SplitOperations
from lockstep.workbench.tui.split.part import SplitPart
from lockstep.workbench.tui.split.tensor import SplitTensor

#: In the order of their keys, from 1.
PARTS: tuple[type[SplitPart], ...] = (SplitOperations, SplitAttention, SplitLogits, SplitTensor)
OPERATIONS, ATTENTION, LOGITS, TENSOR = range(1, 5)
#: The part that opens from a pane, by the pane's number, where it is not the operations.
PART_OF_PANE = {2: ATTENTION, 5: LOGITS, 9: TENSOR}
