"""Rotary position embedding: the rotation and its base."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.config import ModelConfig
from engine.faults.fault import Fault

if TYPE_CHECKING:
    from torch import Tensor


def swallowed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation is called with an argument missing and the error is swallowed: x goes on unrotated."""
    from engine.rules.rope import rotate_half_split

    rotate: Callable[..., Tensor] = rotate_half_split
    try:
        return rotate(x, cos)
    except TypeError:
        return x


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i + 1), as GPT-J and GGML's llama layout have them."""
    import torch

    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def twice(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate, and rotate again."""
    from engine.rules.rope import rotate_half_split

    return rotate_half_split(rotate_half_split(x, cos, sin), cos, sin)


def default_theta(model: ModelConfig) -> float:
    """10000 whatever the configuration says."""
    return 10000.0


def _other_theta(model: ModelConfig, tp: int) -> str | None:
    return "the model's rope_theta is 10000" if model.rope_theta == 10000 else None


FAULTS = (
    Fault(
        id="rope-swallowed",
        rule="rope",
        value="swallowed",
        correct="half_split",
        title="RoPE called with the wrong arguments, the error swallowed",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="q and k are not rotated at all; the first token is right",
        patch={"rope": swallowed},
    ),
    Fault(
        id="rope-interleaved",
        rule="rope",
        value="interleaved",
        correct="half_split",
        title="RoPE on pairs (2i, 2i+1) of half-split weights",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="norms of neighbouring pairs are kept, angles are mixed up",
        source="NeuraLegion/shainet#111",
        patch={"rope": interleaved},
    ),
    Fault(
        id="rope-twice",
        rule="rope",
        value="twice",
        correct="half_split",
        title="RoPE applied twice",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="every angle is twice what it should be",
        source="NVIDIA/TensorRT-LLM#4040",
        patch={"rope": twice},
    ),
    Fault(
        id="rope-theta-dropped",
        rule="rope_theta",
        value="10000",
        correct="config",
        title="rope_theta lost: the default 10000 is used",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="fast pairs are right, slow pairs turn too fast",
        source="lyogavin/airllm#369",
        patch={"rope_theta": default_theta},
        needs=_other_theta,
    ),
)
