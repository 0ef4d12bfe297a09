"""Short gated convolutions (LFM2): gates that are left out, a kernel that is applied backwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import one_seam

if TYPE_CHECKING:
    from torch import Tensor


def ungated(x: Tensor, gate: Tensor) -> Tensor:
    """As it is."""
    return x


def backwards(rows: Tensor, weight: Tensor) -> Tensor:
    """The newest token is multiplied by the oldest one's weight."""
    from lockstep.engine.rules.recurrence import convolution

    return convolution(rows, weight.flip(-1))


def has_gated_convolutions(model: ModelConfig, tp: int) -> str | None:
    """Some layers have short convolutions with gates."""
    return None if model.short_conv is not None else "the model has no gated short convolutions"


FAULTS = (
    one_seam(
        "conv_in_gate", "missing", "times", ungated, "layers.*.attn.conv_in",
        "gate of the convolution's input left out",
        "the convolution sees more than the gate lets through", has_gated_convolutions, group="attention",
    ),
    one_seam(
        "conv_out_gate", "missing", "times", ungated, "layers.*.attn.conv_gated",
        "gate of the convolution's output left out", "all of the convolution goes on", has_gated_convolutions,
        group="attention",
    ),
    one_seam(
        "plain_conv", "backwards", "causal", backwards, "layers.*.attn.conv",
        "kernel of the convolution backwards in time",
        "the newest token counts as the oldest", has_gated_convolutions, group="attention",
    ),
)  # fmt: skip
