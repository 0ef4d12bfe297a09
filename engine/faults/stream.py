"""What enters the residual stream, and what the blocks add to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.engine.faults.fault import Fault

if TYPE_CHECKING:
    from torch import Tensor


def update_alone(residual: Tensor, update: Tensor) -> Tensor:
    """The stream is replaced by the block's output."""
    return update


def residual_twice(residual: Tensor, update: Tensor) -> Tensor:
    """The stream is added once more."""
    return 2 * residual + update


FAULTS = (
    Fault(
        id="residual-missing",
        seam="residual",
        value="missing",
        correct="added",
        title="residual connection left out",
        group="mlp",
        level="step",
        first_tap="layers.*.attn_residual",
        symptom="the stream is the last block's output alone",
        patch={"residual": update_alone},
    ),
    Fault(
        id="residual-twice",
        seam="residual",
        value="twice",
        correct="added",
        title="residual added twice",
        group="mlp",
        level="step",
        first_tap="layers.*.attn_residual",
        symptom="the stream is there once too often after every block",
        source="deepspeedai/DeepSpeed#2834",
        patch={"residual": residual_twice},
    ),
)
