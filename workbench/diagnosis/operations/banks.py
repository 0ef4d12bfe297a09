"""All variants by the operation that they replace. A bank is added here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.diagnosis.operations.activation import activations
from workbench.diagnosis.operations.context import contexts
from workbench.diagnosis.operations.head_maps import score_heads, value_heads
from workbench.diagnosis.operations.mask import masks
from workbench.diagnosis.operations.merged_heads import merged_heads
from workbench.diagnosis.operations.norms import norms
from workbench.diagnosis.operations.residual import residuals
from workbench.diagnosis.operations.rope_frequencies import other_frequencies
from workbench.diagnosis.operations.rotation import rotations
from workbench.diagnosis.operations.score_biases import score_biases
from workbench.diagnosis.operations.scores import scores
from workbench.diagnosis.operations.softmax import softmaxes
from workbench.diagnosis.operations.softmax_fits import softmax_fits
from workbench.diagnosis.operations.variant import Bank

BANKS: Mapping[str, tuple[Bank, ...]] = {
    "embedding": (),
    "norm": (norms,),
    "linear": (),
    "rope": (rotations, other_frequencies),
    "cache": (),
    "scores": (scores, score_heads, score_biases, masks),
    "softmax": (softmaxes, softmax_fits),
    "context": (contexts, merged_heads, value_heads),
    "reduce": (),
    "residual": (residuals,),
    "activation": (activations,),
    "head": (),
}
