"""The gated MLP: its activation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.families import ClampedSwiGLU, Gating
from lockstep.engine.faults.fault import Fault

if TYPE_CHECKING:
    from torch import Tensor


def swapped(gate: Tensor, up: Tensor, activation: Gating) -> Tensor:
    """The activation is on the wrong factor."""
    from lockstep.engine.rules.defaults import act_and_mul

    return act_and_mul(up, gate, activation)


def gelu(gate: Tensor, up: Tensor, activation: Gating) -> Tensor:
    """Another model's activation."""
    import torch.nn.functional as F

    return F.gelu(gate, approximate="tanh") * up


def relu(gate: Tensor, up: Tensor, activation: Gating) -> Tensor:
    """Another model's activation."""
    return gate.relu() * up


def quick_gelu(gate: Tensor, up: Tensor, activation: Gating) -> Tensor:
    """The sigmoid's approximation of GELU."""
    return gate * (1.702 * gate).sigmoid() * up


def ungated(gate: Tensor, up: Tensor, activation: Gating) -> Tensor:
    """The second factor is forgotten."""
    from lockstep.engine.rules.defaults import gated

    return gated(gate, activation)


def unclamped(gate: Tensor, up: Tensor, activation: Gating) -> Tensor:
    """Nothing is cut off."""
    return _clamped(gate, up, activation, limit=math.inf)


def plain_sigmoid(gate: Tensor, up: Tensor, activation: Gating) -> Tensor:
    """The sigmoid is of gate itself."""
    return _clamped(gate, up, activation, slope=1.0)


def without_one(gate: Tensor, up: Tensor, activation: Gating) -> Tensor:
    """1 is not added to up."""
    from lockstep.engine.rules.defaults import gated

    limit = activation.limit if isinstance(activation, ClampedSwiGLU) else math.inf
    return gated(gate, activation) * up.clamp(-limit, limit)


def _clamped(gate: Tensor, up: Tensor, activation: Gating, **other: float) -> Tensor:
    from lockstep.engine.rules.defaults import act_and_mul

    if isinstance(activation, ClampedSwiGLU):
        activation = replace(activation, **other)
    return act_and_mul(gate, up, activation)


def _has_clamp(model: ModelConfig, tp: int) -> str | None:
    return None if model.clamp is not None else "the model's activation is not clamped"


FAULTS = (
    Fault(
        id="gate-up-swapped",
        seam="act",
        value="swapped",
        correct="silu_gate",
        title="silu(up) * gate",
        group="mlp",
        level="step",
        first_tap="layers.*.mlp.act",
        symptom="gate and up are right, their product is not",
        source="ml-explore/mlx-lm#767",
        patch={"act": swapped},
    ),
    Fault(
        id="gelu",
        seam="act",
        value="gelu",
        correct="silu_gate",
        title="GELU instead of SiLU",
        group="mlp",
        level="step",
        first_tap="layers.*.mlp.act",
        symptom="gate and up are right, the activation is another function",
        source="NVIDIA/TensorRT-Model-Connect#177",
        patch={"act": gelu},
    ),
    Fault(
        id="relu",
        seam="act",
        value="relu",
        correct="silu_gate",
        title="ReLU instead of SiLU",
        group="mlp",
        level="step",
        first_tap="layers.*.mlp.act",
        symptom="gate and up are right, the activation is another function",
        patch={"act": relu},
    ),
    Fault(
        id="quick-gelu",
        seam="act",
        value="quick_gelu",
        correct="silu_gate",
        title="quick GELU instead of SiLU",
        group="mlp",
        level="step",
        first_tap="layers.*.mlp.act",
        symptom="gate and up are right, the activation is another function",
        patch={"act": quick_gelu},
    ),
    Fault(
        id="ungated",
        seam="act",
        value="ungated",
        correct="silu_gate",
        title="silu(gate) without up",
        group="mlp",
        level="step",
        first_tap="layers.*.mlp.act",
        symptom="gate and up are right, the product with up is missing",
        patch={"act": ungated},
    ),
    *(
        Fault(
            id=f"act-{value}".replace("_", "-"),
            seam="act",
            value=value,
            correct="silu_gate",
            title=title,
            group="mlp",
            level="step",
            first_tap="layers.*.mlp.experts.act",
            symptom=symptom,
            patch={"act": patch},
            needs=_has_clamp,
        )
        for value, title, symptom, patch in (
            ("unclamped", "gate and up not clamped", "right but for large numbers", unclamped),
            (
                "plain_sigmoid",
                "sigmoid(gate) in place of sigmoid(alpha * gate)",
                "every number is off",
                plain_sigmoid,
            ),
            ("without_one", "up in place of up + 1", "most of the activation is missing", without_one),
        )
    ),
)
