"""Windows, chunks, sinks, caps of scores, rotations that differ from layer to layer."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.layers.attention import Attention
from lockstep.engine.model import Decoder
from lockstep.engine.parallel import shards
from lockstep.engine.rules import defaults
from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

SCORES = ("attn.scores",)
PROBS = ("attn.probs",)


# -- what is seen --------------------------------------------------------------------------------------------


@bug(
    "window",
    accepted=("mask", "scores"),
    words="window|one more|key|sliding|distance|mask",
    taps=SCORES,
    model="gemma4-moe",
    tp=2,
    ep=1,
)
def window_holds_one_key_more_than_the_configuration_says(p: Spoilt) -> None:
    """The kernel's `window_size=(left, 0)` does not count the query's own key, and is given sliding_window."""

    def window(q_positions: Tensor, rows: slice, kv_positions: Tensor, window: int | None) -> Tensor:
        return defaults.within_window(q_positions, rows, kv_positions, None if window is None else window + 1)

    p.rules(window=window)


@bug(
    "window",
    accepted=("mask", "scores", "layer", "layers"),
    words="window|sliding|full|mask|key",
    taps=SCORES,
    model="gpt-oss",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def windows_are_in_the_layers_that_have_none(p: Spoilt) -> None:
    """`layer_idx % 2 == 1` for the layers with a window, from an implementation that counts layers from one."""

    def spoil(decoder: Decoder) -> None:
        for layer in decoder.layers:
            assert isinstance(layer.attention, Attention)
            layer.attention.window = 8 if layer.attention.window is None else None

    p.loaded(spoil)


@bug(
    "chunks",
    accepted=("mask", "scores"),
    words="chunk|window|sliding|mask|key",
    taps=SCORES,
    layers=(0, 2),
    model="llama4",
    tp=2,
    ep=2,
)
def chunks_of_attention_are_taken_for_a_sliding_window(p: Spoilt) -> None:
    """attention_chunk_size is passed on as sliding_window to a backend without chunks."""
    p.rules(chunk=defaults.within_window)


# -- softmax -------------------------------------------------------------------------------------------------


@bug(
    "sinks",
    accepted=("softmax", "weight", "attention"),
    words="sink",
    taps=PROBS,
    step=1,
    model="gpt-oss",
    tp=2,
    ep=2,
)
def backend_of_decode_has_no_sinks(p: Spoilt) -> None:
    """Prompts run by a kernel that takes them; that of decode drops an argument it does not know."""

    def beside(scores: Tensor, sinks: Tensor, dtype: torch.dtype) -> Tensor:
        return defaults.softmax(scores, dtype)

    p.rules(sinks=p.later(defaults.softmax_beside, beside))


@bug(
    "sinks",
    accepted=("softmax", "weight", "sharding", "heads"),
    words="sink",
    taps=PROBS,
    ranks=(1,),
    model="gpt-oss",
    tp=2,
    ep=1,
)
def sinks_of_each_rank_are_those_of_the_first_heads(p: Spoilt) -> None:
    """They are no linear layer's, so that they are narrowed by hand, from 0 on."""

    def shard(name: str, model: ModelConfig, tp: int, rank: int, ep: int = 1) -> shards.Shard:
        return shards.plan(name, model, tp, 0 if name.endswith("sinks") else rank, ep)

    p.rules(shard=shard)


@bug(
    "cap",
    accepted=("scores", "clip", "activation", "skipped", "scale", "attention"),
    words="cap|tanh|clip|limit|bound",
    taps=SCORES,
    step=1,
    model="gemma2",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def scores_of_decode_are_not_capped(p: Spoilt) -> None:
    """logits_soft_cap is an argument of the prompt's kernel, and of the decode kernel only in a later version."""

    p.rules(soft_cap=p.later(defaults.capped, lambda scores, limit: scores))


# -- rotation ------------------------------------------------------------------------------------------------


@bug(
    "rotation",
    accepted=("rope", "positions", "layer", "skipped"),
    words="rotat|rope|turn|unrotated|nope|position|angle",
    taps=ROTATED,
    layers=(1,),
    model="exaone-moe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def layers_that_see_everything_are_rotated_too(p: Spoilt) -> None:
    """The rotation depends on the layer's kind in this family, which the port has overlooked."""

    def layer_rope(model: ModelConfig, layer: int) -> ModelConfig:
        return ModelConfig.of_layer(model, 0)

    p.rules(layer_rope=layer_rope)
