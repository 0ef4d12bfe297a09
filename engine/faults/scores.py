"""Attention scores: their scale, and how far back a sliding window reaches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import Fault
from lockstep.engine.faults.needs import own_kv, several_heads
from lockstep.engine.faults.sinks import no_sinks

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def unscaled(model: ModelConfig) -> float:
    """Scores are not scaled."""
    return 1.0


def scale_by_hidden(model: ModelConfig) -> float:
    """Scaled by the model's width instead of the head's."""
    return 1 / math.sqrt(model.hidden_size)


def window_one_more(q_positions: Tensor, rows: slice, kv_positions: Tensor, window: int | None) -> Tensor:
    """Both bounds of the window are taken as inclusive."""
    from lockstep.engine.rules.defaults import within_window

    return within_window(q_positions, rows, kv_positions, None if window is None else window + 1)


def window_ignored(q_positions: Tensor, rows: slice, kv_positions: Tensor, window: int | None) -> Tensor:
    """The window is not passed on."""
    from lockstep.engine.rules.defaults import within_window

    return within_window(q_positions, rows, kv_positions, None)


def _window(model: ModelConfig, tp: int) -> str | None:
    return None if any(model.windows) and not model.chunked else "the model has no sliding window"


def scale_twice(model: ModelConfig) -> float:
    """The scale is applied to q and to the scores."""
    return 1 / model.head_dim


def top_left(q_positions: Tensor, rows: slice, kv_positions: Tensor, window: int | None) -> Tensor:
    """Row i of the queries sees keys 0 … i, wherever the queries stand: torch's `is_causal`."""
    import torch

    from lockstep.engine.rules.defaults import within_window

    numbers = torch.arange(len(q_positions), device=q_positions.device)
    return within_window(numbers, rows, kv_positions - kv_positions[0], window)


def window_in_prefill_only(
    q_positions: Tensor, rows: slice, kv_positions: Tensor, window: int | None
) -> Tensor:
    """A decode step attends to the whole cache."""
    from lockstep.engine.rules.defaults import within_window

    return within_window(q_positions, rows, kv_positions, None if len(q_positions) == 1 else window)


def half_precision_softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Exponentials and their sum in bfloat16."""
    import torch

    return scores.to(torch.bfloat16).softmax(-1).to(dtype)


def softmax_plus_one(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """One is added to the sum, as for a sink that has no value."""
    import torch

    wide = scores.float()
    sums = torch.logaddexp(wide.logsumexp(-1, keepdim=True), torch.zeros((), device=wide.device))
    return (wide - sums).exp().to(dtype)


def features_first(heads: Tensor) -> Tensor:
    """The heads' outputs are laid side by side feature by feature."""
    return heads.permute(1, 2, 0).flatten(1)


def keys_as_values(keys: Tensor, values: Tensor) -> Tensor:
    """The cache of the keys is read for the values."""
    return keys


FAULTS = (
    Fault(
        id="scale-missing",
        seam="scale",
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
        seam="scale",
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
        seam="window",
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
        seam="window",
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
    Fault(
        id="scale-twice",
        seam="scale",
        value="twice",
        correct="head_dim",
        title="attention scaled twice",
        group="attention",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="scores are sqrt(head_dim) times too small: attention is nearly even",
        patch={"scale": scale_twice},
    ),
    Fault(
        id="causal-top-left",
        seam="window",
        value="top_left",
        correct="config",
        title="causal mask aligned to the first key",
        group="attention",
        level="step",
        first_tap="layers.*.attn.scores",
        step=1,
        symptom="the prefill is right; a decode step sees the first token alone",
        source="pytorch/pytorch#108108",
        patch={"window": top_left},
    ),
    Fault(
        id="window-in-prefill-only",
        seam="window",
        value="prefill_only",
        correct="config",
        title="sliding window ignored in decode",
        group="attention",
        level="step",
        first_tap="layers.*.attn.scores",
        step=1,
        symptom="the prefill is right; a decode step attends to the whole cache",
        source="karpathy/nanochat#456",
        patch={"window": window_in_prefill_only},
        needs=_window,
    ),
    Fault(
        id="softmax-low-precision",
        seam="softmax",
        value="bfloat16",
        correct="float32",
        title="softmax in bfloat16",
        group="attention",
        level="step",
        first_tap="layers.*.attn.probs",
        symptom="probabilities are right to two or three digits and do not add up to one",
        patch={"softmax": half_precision_softmax},
        needs=no_sinks,
    ),
    Fault(
        id="softmax-plus-one",
        seam="softmax",
        value="plus_one",
        correct="float32",
        title="softmax with one added to its sum",
        group="attention",
        level="step",
        first_tap="layers.*.attn.probs",
        symptom="the probabilities of a row add up to less than one",
        patch={"softmax": softmax_plus_one},
        needs=no_sinks,
    ),
    Fault(
        id="heads-merged-wrong",
        seam="merge",
        value="features_first",
        correct="heads_first",
        title="heads merged feature by feature",
        group="attention",
        level="step",
        first_tap="layers.*.attn.context",
        symptom="every number of the context is there, in another column",
        patch={"merge": features_first},
        needs=several_heads,
    ),
    Fault(
        id="keys-as-values",
        seam="cache_values",
        value="keys",
        correct="values",
        title="keys read for the values",
        group="cache",
        level="step",
        first_tap="layers.*.attn.context",
        symptom="probabilities are right, what they weigh are keys",
        source="ikawrakow/ik_llama.cpp#1592",
        patch={"cache_values": keys_as_values},
        needs=own_kv,
    ),
)
