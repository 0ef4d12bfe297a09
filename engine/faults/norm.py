"""RMS normalisation: its epsilon and its weight."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from engine.config import ModelConfig
from engine.faults.fault import Fault

if TYPE_CHECKING:
    from torch import Tensor


def fixed_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Ten times the usual epsilon."""
    from engine.rules.norm import rms_norm

    return rms_norm(x, weight, 1e-5)


def weight_plus_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The weight is taken as an offset from one, as Gemma's is."""
    from engine.rules.norm import rms_norm

    return rms_norm(x, 1 + weight, eps)


def _other_eps(model: ModelConfig, tp: int) -> str | None:
    same = math.isclose(model.rms_eps, 1e-5, rel_tol=1e-6)  # a GGUF file has it in float32
    return "the model's epsilon is 1e-5" if same else None


FAULTS = (
    Fault(
        id="norm-eps",
        rule="norm",
        value="eps_1e-5",
        correct="rms",
        title="RMSNorm epsilon hard-coded",
        group="norm",
        level="step",
        first_tap="layers.*.attn_norm",
        symptom="a small error where activations are small, shrinking with depth",
        source="ggml-org/llama.cpp#2373",
        patch={"norm": fixed_eps},
        needs=_other_eps,
    ),
    Fault(
        id="norm-plus-one",
        rule="norm",
        value="plus_one",
        correct="rms",
        title="RMSNorm weight applied as 1 + w",
        group="norm",
        level="step",
        first_tap="layers.*.attn_norm",
        symptom="every channel is off by (1 + w) / w",
        source="quantumaikr/quant.cpp#23",
        patch={"norm": weight_plus_one},
    ),
)
