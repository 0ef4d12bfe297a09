"""What a model computes, stated once and torch-free: operations, what they read, and their weights.

for operation in layer_operations(parts_of(model)):
    operation.tap, operation.kind, operation.inputs
"""

from lockstep.engine.graph.decoder import (
    BLOCKS,
    GATE_UP,
    LAYER,
    LAYER_OUTPUT,
    MULTIPLIED,
    OUTSIDE,
    OUTSIDE_MODULES,
    QKV,
    STATE_TAPS,
    final_norm_of,
    instead_of,
    layer_operations,
    operation_of,
    operations_of,
    outside_of,
    parts_in,
    parts_of,
)
from lockstep.engine.graph.operation import STREAM, Form, Kind, Operation, Part, Width

__all__ = [
    "BLOCKS",
    "GATE_UP",
    "LAYER",
    "LAYER_OUTPUT",
    "MULTIPLIED",
    "OUTSIDE",
    "OUTSIDE_MODULES",
    "QKV",
    "STATE_TAPS",
    "STREAM",
    "Form",
    "Kind",
    "Operation",
    "Part",
    "Width",
    "final_norm_of",
    "instead_of",
    "layer_operations",
    "operation_of",
    "operations_of",
    "outside_of",
    "parts_in",
    "parts_of",
]
