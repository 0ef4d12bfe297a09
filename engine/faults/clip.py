"""Projections that are clamped (OLMo)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import one_seam

if TYPE_CHECKING:
    from torch import Tensor


def as_projected(x: Tensor, limit: float) -> Tensor:
    """q, k and v as they were projected."""
    return x


def has_clip(model: ModelConfig, tp: int) -> str | None:
    """q, k and v are clamped."""
    return None if model.clip_qkv is not None else "the model does not clamp q, k and v"


FAULTS = (
    one_seam(
        "clip_qkv", "missing", "clamped", as_projected, "layers.*.attn.q_clip", "q, k and v not clamped",
        "outliers of q, k and v go through; where there are none nothing is wrong", has_clip, group="attention",
    ),
)  # fmt: skip
