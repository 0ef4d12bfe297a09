"""The gated MLP: its activation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.engine.faults.fault import Fault

if TYPE_CHECKING:
    from torch import Tensor


def swapped(gate: Tensor, up: Tensor) -> Tensor:
    """The activation is on the wrong factor."""
    import torch.nn.functional as F

    return F.silu(up) * gate


def gelu(gate: Tensor, up: Tensor) -> Tensor:
    """Another model's activation."""
    import torch.nn.functional as F

    return F.gelu(gate, approximate="tanh") * up


def relu(gate: Tensor, up: Tensor) -> Tensor:
    """Another model's activation."""
    return gate.relu() * up


def quick_gelu(gate: Tensor, up: Tensor) -> Tensor:
    """The sigmoid's approximation of GELU."""
    return gate * (1.702 * gate).sigmoid() * up


def ungated(gate: Tensor, up: Tensor) -> Tensor:
    """The second factor is forgotten."""
    import torch.nn.functional as F

    return F.silu(gate)


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
)
