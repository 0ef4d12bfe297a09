"""Attention scores: their scale, and how far back a sliding window reaches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from engine.config import ModelConfig
from engine.faults.fault import Fault

if TYPE_CHECKING:
    from torch import Tensor


def unscaled(model: ModelConfig) -> float:
    """Scores are not scaled."""
    return 1.0


def scale_by_hidden(model: ModelConfig) -> float:
    """Scaled by the model's width instead of the head's."""
    return 1 / math.sqrt(model.hidden_size)


def window_one_more(q_positions: Tensor, kv_positions: Tensor, window: int | None) -> Tensor:
    """Both bounds of the window are taken as inclusive."""
    from engine.rules.defaults import within_window

    return within_window(q_positions, kv_positions, None if window is None else window + 1)


def window_ignored(q_positions: Tensor, kv_positions: Tensor, window: int | None) -> Tensor:
    """The window is not passed on."""
    from engine.rules.defaults import within_window

    return within_window(q_positions, kv_positions, None)


def _window(model: ModelConfig, tp: int) -> str | None:
    return None if any(model.windows) else "the model has no sliding window"


FAULTS = (
    Fault(
        id="scale-missing",
        rule="scale",
        value="one",
        correct="head_dim",
        title="attention scores not scaled",
        group="attention",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="scores are sqrt(head_dim) times too large",
        source="mlc-ai/mlc-llm#3426",
        patch={"scale": unscaled},
    ),
    Fault(
        id="scale-by-width",
        rule="scale",
        value="hidden",
        correct="head_dim",
        title="attention scaled by the model's width",
        group="attention",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="scores are too small by a constant factor",
        source="karpathy/ng-video-lecture#6",
        patch={"scale": scale_by_hidden},
    ),
    Fault(
        id="window-one-more",
        rule="window",
        value="one_more",
        correct="config",
        title="sliding window one token too wide",
        group="attention",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="right up to the window's length, then one key too many",
        source="huggingface/transformers#39408",
        patch={"window": window_one_more},
        needs=_window,
    ),
    Fault(
        id="window-ignored",
        rule="window",
        value="ignored",
        correct="config",
        title="sliding window ignored",
        group="attention",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="right up to the window's length, then attends to everything",
        source="huggingface/transformers#35691",
        patch={"window": window_ignored},
        needs=_window,
    ),
)
