"""All variants by the operation that they replace. A bank is added here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.diagnosis.operations.activation import activations
from workbench.diagnosis.operations.norms import norms
from workbench.diagnosis.operations.residual import residuals
from workbench.diagnosis.operations.rope_frequencies import other_frequencies
from workbench.diagnosis.operations.rotation import rotations
from workbench.diagnosis.operations.variant import Bank

BANKS: Mapping[str, tuple[Bank, ...]] = {
    "embedding": (),
    "norm": (norms,),
    "linear": (),
    "rope": (rotations, other_frequencies),
    "cache": (),
    "scores": (),
    "softmax": (),
    "context": (),
    "reduce": (),
    "residual": (residuals,),
    "activation": (activations,),
    "head": (),
}
