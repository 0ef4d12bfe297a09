"""xIELU, an activation with numbers that were trained (Apertus)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import one_seam

if TYPE_CHECKING:
    from torch import Tensor


def raw_slope(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """The curvature of positive inputs is used as it is stored."""
    import torch.nn.functional as F

    from lockstep.engine.rules.activation import xielu

    right, slope = xielu(x, alpha_p, alpha_n, beta, eps), alpha_p.float()
    return (right + (slope - F.softplus(slope)) * x.float().clamp(min=0).square()).to(x.dtype)


def has_xielu(model: ModelConfig, tp: int) -> str | None:
    """The MLP's activation is xIELU."""
    return None if model.activation == "xielu" else "the model's activation is another one than xIELU"


FAULTS = (
    one_seam(
        "xielu", "raw_slope", "softplus", raw_slope, "layers.*.mlp.act", "xIELU's alpha_p without softplus",
        "what positive inputs give has another curvature", has_xielu, group="mlp",
    ),
)  # fmt: skip
