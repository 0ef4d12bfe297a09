"""Rotary embedding that differs from layer to layer, or rotates a part of each head."""

from __future__ import annotations

from dataclasses import replace

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import Fault
from lockstep.engine.faults.needs import all_of, own_kv, same_sizes


def same_everywhere(model: ModelConfig, layer: int) -> ModelConfig:
    """All layers rotate alike: those with a window, and those that should not rotate at all."""
    return replace(model, layer_ropes=())


def _by_layer(model: ModelConfig, tp: int) -> str | None:
    return None if model.layer_ropes else "all layers of the model rotate alike"


def whole_heads(model: ModelConfig, layer: int) -> ModelConfig:
    """All channels of a head are rotated."""
    return replace(model.of_layer(layer), rotary=None)


def _in_part(model: ModelConfig, tp: int) -> str | None:
    return None if model.rotary is not None else "the model rotates whole heads"


def halves(model: ModelConfig, layer: int) -> ModelConfig:
    """Channels (i, i + D/2) are rotated together, as in most models."""
    return replace(model.of_layer(layer), neighbours=False)


def _neighbours(model: ModelConfig, tp: int) -> str | None:
    return None if model.neighbours else "the model does not rotate neighbouring channels"


FAULTS = (
    Fault(
        id="rope-same-in-all-layers",
        seam="layer_rope",
        value="same",
        correct="config",
        title="one rotation for all types of layers",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="layers of one type are right, q and k of the others are turned by other angles",
        patch={"layer_rope": same_everywhere},
        needs=all_of(_by_layer, same_sizes),
    ),
    Fault(
        id="rope-whole-heads",
        seam="layer_rope",
        value="whole",
        correct="config",
        title="whole heads rotated instead of a part",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="channels are turned that should stay, the others by other angles",
        source="vllm-project/vllm#41185",
        patch={"layer_rope": whole_heads},
        needs=all_of(own_kv, _in_part),
    ),
    Fault(
        id="rope-halves",
        seam="layer_rope",
        value="halves",
        correct="config",
        title="halves of the heads rotated instead of neighbouring channels",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="position 0 is right, everything after it is wrong",
        patch={"layer_rope": halves},
        needs=_neighbours,
    ),
)
