"""What enters the residual stream, and what the blocks add to it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import Fault

if TYPE_CHECKING:
    from torch import Tensor


def update_alone(residual: Tensor, update: Tensor) -> Tensor:
    """The stream is replaced by the block's output."""
    return update


def residual_twice(residual: Tensor, update: Tensor) -> Tensor:
    """The stream is added once more."""
    return 2 * residual + update


def scaled_rows(rows: Tensor, model: ModelConfig) -> Tensor:
    """Embeddings are multiplied by the root of the width, as Gemma's are."""
    return rows * math.sqrt(model.hidden_size)


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
    Fault(
        id="embedding-scaled",
        seam="embedding",
        value="scaled",
        correct="rows",
        title="embeddings scaled by the root of the width",
        group="loading",
        level="step",
        first_tap="embed",
        symptom="every embedding is too large by one factor",
        patch={"embedding": scaled_rows},
    ),
)
