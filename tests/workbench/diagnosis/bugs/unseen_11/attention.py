"""Attention of layers that are not all alike: windows, sinks, caps, who rotates and by how much."""

from __future__ import annotations

import torch

from lockstep.engine.config import ModelConfig
from lockstep.engine.rules import defaults, rope
from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

SCORES = ("attn.scores", "attn.probs")
WINDOW = ("mask", "scores", "attention")
WINDOWED = "window|mask|sees|seen|key|local|slid|distance|far|attend"


def _windows(decoder, change):
    """`change(layer, window)` in place of each layer's window."""
    for i, layer in enumerate(decoder.layers):
        layer.attention.window = change(i, layer.attention.window)


@bug(
    "window",
    accepted=WINDOW,
    words=WINDOWED,
    taps=SCORES,
    layers=(0, 2),
    model="gemma3",
    dtype="bfloat16",
    ep=1,
)
def sliding_layers_see_one_key_too_many(p: Spoilt) -> None:
    """The kernel's window is that of keys before the query; the configuration counts the query."""
    p.loaded(lambda decoder: _windows(decoder, lambda i, window: window and window + 1))


@bug("window", accepted=WINDOW, words=WINDOWED, taps=SCORES, step=1, model="cohere2", tp=2, ep=1)
def decode_kernel_knows_no_window(p: Spoilt) -> None:
    def spoil(decoder):
        attention = decoder.layers[0].attention
        right = attention._attended

        def attended(*args):
            attention.window = None if p.decode else 8
            return right(*args)

        attention._attended = attended

    p.loaded(spoil)


@bug(
    "window",
    accepted=WINDOW,
    words=WINDOWED + "|block",
    taps=SCORES,
    layers=(1,),
    model="ministral",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def window_begins_at_the_edge_of_a_block(p: Spoilt) -> None:
    """All four keys of the block are seen in which the window begins."""

    def in_blocks(queries, rows, keys, window):
        if window is None:
            return defaults.within_window(queries, rows, keys, None)
        first = (queries[rows, None] - window + 1).clamp(min=0) // 4 * 4
        return (keys <= queries[rows, None]) & (keys >= first)

    p.rules(window=in_blocks)


@bug("window", accepted=WINDOW, words=WINDOWED, taps=SCORES, layers=(0, 1, 2), model="qwen2-window", ep=1)
def max_window_layers_counts_the_layers_with_a_window(p: Spoilt) -> None:
    """It counts the first ones without."""
    p.loaded(lambda decoder: _windows(decoder, lambda i, window: 8 if i < 1 else None))


@bug(
    "window",
    accepted=(*WINDOW, "sharding"),
    words=WINDOWED + "|rank",
    taps=SCORES,
    layers=(0, 1, 2),
    ranks=(1,),
    model="olmo3",
    tp=2,
    ep=1,
)
def second_rank_attends_without_windows(p: Spoilt) -> None:
    if p.rank == 1:
        p.loaded(lambda decoder: _windows(decoder, lambda i, window: None))


@bug(
    "sinks",
    accepted=("softmax", "weight", "heads", "bias", "attention"),
    words="sink|order|head|permut|transpos|other|group|weight",
    taps=("attn.probs",),
    layers=(1,),
    model="gpt-oss",
    ep=1,
)
def sinks_of_one_layer_are_in_the_order_of_the_groups(p: Spoilt) -> None:
    """Heads are [group, KV head] in this kernel's layout; its sinks were permuted, and the queries were not."""

    def spoil(decoder):
        sinks = decoder.layers[1].attention.sinks
        sinks.copy_(sinks.clone().view(-1, 2).T.flatten())

    p.loaded(spoil)


@bug(
    "sinks",
    accepted=("softmax", "attention"),
    words="sink|softmax|sum|without|missing",
    taps=("attn.probs",),
    step=1,
    model="gpt-oss",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def decode_kernel_takes_no_sinks(p: Spoilt) -> None:
    def without(scores, sinks, dtype):
        return defaults.softmax(scores, dtype)

    p.rules(sinks=p.later(defaults.softmax_beside, without))


@bug(
    "cap",
    accepted=("scores", "scale", "clip", "attention"),
    words="cap|tanh|limit|scal|2|3",
    taps=SCORES,
    model="gemma2",
    dtype="bfloat16",
    ep=1,
)
def scores_have_the_cap_of_the_logits(p: Spoilt) -> None:
    p.rules(soft_cap=lambda scores, cap: defaults.capped(scores, 3.0))


@bug(
    "rotation",
    accepted=("rope", "positions", "layer", "layers"),
    words="theta|base|frequenc|rope|rotat|angle|layer|global|full|factor|position|scal",
    taps=ROTATED,
    layers=(2,),
    model="gemma3",
    tp=2,
    ep=1,
)
def second_sliding_layer_turns_as_the_full_ones_do(p: Spoilt) -> None:
    """Its place in the pattern is one off."""
    p.rules(layer_rope=lambda model, layer: model.of_layer(1 if layer == 2 else layer))


@bug(
    "rotation",
    accepted=("rope", "scale"),
    words="factor|scal|yarn|times|magnitude|length|cos|sin|longer|larger|attention",
    taps=ROTATED,
    layers=(3,),
    model="olmo3",
    dtype="bfloat16",
    ep=1,
)
def attention_factor_of_yarn_is_left_out(p: Spoilt) -> None:
    def plain(model: ModelConfig, theta, length=0):
        return rope.frequencies(model, theta, length)[0], 1.0

    p.rules(rope_frequencies=plain)


@bug(
    "rotation",
    accepted=("rope", "positions", "layer", "skipped"),
    words="rotat|rope|position|turn|skip|missing|not|without",
    taps=ROTATED,
    layers=(2,),
    model="smollm3",
    tp=2,
    ep=1,
)
def layers_from_the_first_without_positions_on_have_none(p: Spoilt) -> None:
    """no_rope_layers is read as the number of a layer."""
    p.rules((2,), rope=lambda x, cos, sin: x)


@bug(
    "rotation",
    accepted=("rope",),
    words="pair|half|halves|neighbour|interleav|convention|neox|gpt-j|rotat|rope",
    taps=ROTATED,
    model="glm4",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def rotated_part_turns_in_halves_where_it_turns_in_neighbours(p: Spoilt) -> None:
    def halves(x, cos, sin):
        """The seam is given even channels before odd ones."""
        own = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        turned = rope.rotate_half_split(own, cos, sin)
        return turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

    p.rules(rope=halves)


@bug(
    "rotation",
    accepted=("rope", "positions"),
    words="frequenc|theta|base|dim|width|partial|angle|rope|rotat|part",
    taps=ROTATED,
    model="minimax-m2",
    ep=1,
)
def frequencies_of_a_partial_rotation_are_those_of_the_whole_head(p: Spoilt) -> None:
    """The exponent runs over head_dim, not rotary_dim."""

    def frequencies(model: ModelConfig, theta, length=0):
        right, factor = rope.frequencies(model, theta, length)
        exponents = torch.arange(len(right), dtype=torch.float32) * 2 / model.head_dim
        return theta**-exponents, factor

    p.rules(rope_frequencies=frequencies)
