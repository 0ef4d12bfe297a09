"""The gated MLP: its activation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.faults.fault import Fault

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


FAULTS = (
    Fault(
        id="gate-up-swapped",
        rule="act",
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
        rule="act",
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
)
