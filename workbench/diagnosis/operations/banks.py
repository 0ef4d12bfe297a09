"""All variants by the operation that they replace. A bank is added here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.diagnosis.operations.variant import Bank

BANKS: Mapping[str, tuple[Bank, ...]] = {
    "embedding": (),
    "norm": (),
    "linear": (),
    "rope": (),
    "cache": (),
    "scores": (),
    "softmax": (),
    "context": (),
    "reduce": (),
    "residual": (),
    "activation": (),
    "head": (),
}
