"""Falcon-H1: multipliers that are left out, and one of two blocks side by side that does not count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import one_seam
from lockstep.engine.faults.needs import all_of
from lockstep.engine.graph.multipliers import FACTORS

if TYPE_CHECKING:
    from torch import Tensor

_PARTS = ("z", "x", "b", "c", "dt")


def without(left_out: tuple[str, ...], x: Tensor, factor: float, tap: str) -> Tensor:
    """x as it is where its multiplier is one of those."""
    return x if FACTORS[tap] in left_out else x * factor


def states_alone(states: Tensor, attended: Tensor) -> Tensor:
    """What Mamba-2 gives, without attention."""
    return states


def attention_alone(states: Tensor, attended: Tensor) -> Tensor:
    """What attention gives, without Mamba-2."""
    return attended


def side_by_side(model: ModelConfig, tp: int) -> str | None:
    """Attention and Mamba-2 stand side by side."""
    return None if model.beside else "the model has no attention beside Mamba-2"


def _multiplied(names: tuple[str, ...]) -> Callable[[ModelConfig, int], str | None]:
    def needs(model: ModelConfig, tp: int) -> str | None:
        there = model.multipliers is not None and any(getattr(model.multipliers, one) != 1 for one in names)
        return None if there else "the model has no such multiplier"

    return needs


FAULTS = (
    one_seam(
        "multiplied", "without_parts", "config", partial(without, _PARTS), "layers.*.attn.ssm_*_scaled",
        "ssm_multipliers left out", "states take up too much or too little, and forget at another rate",
        all_of(side_by_side, _multiplied(_PARTS)), group="attention",
    ),
    one_seam(
        "multiplied", "without_key", "config", partial(without, ("key",)), "layers.*.attn.k_scaled",
        "key_multiplier left out", "attention is too sharp or too flat",
        all_of(side_by_side, _multiplied(("key",))), group="attention",
    ),
    one_seam(
        "mixed", "states", "sum", states_alone, "layers.*.attn.mixed", "attention beside Mamba-2 not added",
        "each layer knows of earlier tokens only what its states have kept", side_by_side, group="attention",
    ),
    one_seam(
        "mixed", "attention", "sum", attention_alone, "layers.*.attn.mixed", "Mamba-2 beside attention not added",
        "each layer's state is computed and never counts", side_by_side, group="attention",
    ),
)  # fmt: skip
