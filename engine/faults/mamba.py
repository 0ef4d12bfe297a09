"""Mamba-2: what is made of step sizes and of the decay, the skip, the gate and its norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import Fault, one_seam
from lockstep.engine.faults.needs import all_of, several_ranks
from lockstep.engine.faults.norm import own_squares

if TYPE_CHECKING:
    from torch import Tensor


def without_dt_bias(dt: Tensor, dt_bias: Tensor, limits: tuple[float, float]) -> Tensor:
    """Step sizes without their bias."""
    import torch.nn.functional as F

    return F.softplus(dt.float()).clamp(*limits)


def without_softplus(dt: Tensor, dt_bias: Tensor, limits: tuple[float, float]) -> Tensor:
    """Step sizes without their softplus."""
    return dt.float() + dt_bias.float()


def of_the_logarithm(a_log: Tensor) -> Tensor:
    """A_log in place of its exponential."""
    return -a_log.float()


def without_skip(read: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """What is read from the state alone."""
    return read


def without_conv_bias(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The convolution without its bias."""
    from lockstep.engine.rules.recurrence import short_convolution

    return short_convolution(rows, weight)


def gate_after_norm(
    x: Tensor, gate: Tensor, weight: Tensor, normalised: Callable[[Tensor], Tensor]
) -> Tensor:
    """The gate is multiplied after the norm."""
    import torch.nn.functional as F

    return (weight * normalised(x.float()).to(x.dtype) * F.silu(gate.float())).to(x.dtype)


def has_mamba(model: ModelConfig, tp: int) -> str | None:
    """Some layers have Mamba-2."""
    return None if model.mamba is not None else "the model has no Mamba-2"


def has_conv_bias(model: ModelConfig, tp: int) -> str | None:
    """Whose convolution has a bias."""
    return has_mamba(model, tp) or (None if model.conv_bias else "the convolution of Mamba-2 has no bias")


def has_norm(model: ModelConfig, tp: int) -> str | None:
    """What is read goes through a norm."""
    normed = model.mamba is not None and model.mamba.normed
    return has_mamba(model, tp) or (None if normed else "Mamba-2 has no norm")


def gate_first(model: ModelConfig, tp: int) -> str | None:
    """The gate stands before the norm."""
    behind = model.mamba is not None and model.mamba.norm_first
    return has_norm(model, tp) or ("the gate of Mamba-2 stands behind its norm" if behind else None)


def shared_norm(model: ModelConfig, tp: int) -> str | None:
    """Ranks share what the gated norm normalises together."""
    groups = 0 if model.mamba is None else model.mamba.norm_groups
    return has_norm(model, tp) or (
        None if groups == 1 else "the gated norm of Mamba-2 is of groups, which ranks do not all share"
    )


def _fault(
    seam: str, value: str, correct: str, patch: Callable[..., object], tap: str, title: str, symptom: str
) -> Fault:
    return one_seam(
        seam, value, correct, patch, f"layers.*.attn.{tap}", title, symptom,
        {"ssm_conv": has_conv_bias, "ssm_norm": gate_first}.get(seam, has_mamba), group="attention",
    )  # fmt: skip


FAULTS = (
    _fault(
        "ssm_conv", "unbiased", "biased", without_conv_bias, "ssm_conv_x", "bias of Mamba-2's convolution left out",
        "what enters the state is off by a vector",
    ),
    _fault(
        "ssm_step", "unbiased", "softplus", without_dt_bias, "ssm_step", "step size without dt_bias",
        "states are forgotten too fast or too slowly",
    ),
    _fault(
        "ssm_step", "linear", "softplus", without_softplus, "ssm_step", "step size without softplus",
        "no step is as long as it should be",
    ),
    _fault(
        "ssm_rate", "log", "exp", of_the_logarithm, "ssm_state", "A_log taken for A",
        "some states grow instead of being forgotten",
    ),
    _fault(
        "ssm_skip", "missing", "added", without_skip, "ssm_read", "skip D of Mamba-2 left out",
        "each token's own part is missing",
    ),
    _fault(
        "ssm_norm", "gate_after", "gate_before", gate_after_norm, "ssm_norm", "gate of Mamba-2 after its norm",
        "channels whose gate is closed count in the norm",
    ),
    one_seam(
        "sum_squares", "own_channels", "all_ranks", own_squares, "layers.*.attn.ssm_norm",
        "gated norm by the mean of a rank's own channels",
        "each rank's channels are off by a factor of their own; one rank alone is right",
        all_of(shared_norm, several_ranks), group="attention",
    ),
)  # fmt: skip
