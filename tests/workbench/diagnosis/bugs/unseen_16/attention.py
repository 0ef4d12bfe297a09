"""Rotation, masks, scores and softmax of dense models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt
from tests.workbench.diagnosis.bugs.patched import Patched

SCORES = ("attn.scores",)
PROBS = ("attn.probs",)
FREQUENCIES = "frequen|theta|base|scal|factor|angle|rope|rotat|turn|slow|fast"
SEEN = "mask|see|sight|window|future|ahead|far|hid|visible|attends to|causal"


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1, T, heads, D] rotated by halves; cos and sin are [1, T, D]."""
    first, second = x.chunk(2, -1)
    return x * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None]


def by_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1, heads, T, D] rotated in pairs (2i, 2i + 1); cos and sin are [1, T, D], as for halves."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


# -- rotation ------------------------------------------------------------------------------------------------


@bug(
    "positions", accepted=("rope", "positions"),
    words="position|clamp|clip|limit|maxim|capp|table|256|255|rotat|beyond|last|constant|same", taps=ROTATED,
    model="llama-long", dtype="bfloat16",
)  # fmt: skip
def positions_stop_at_the_end_of_the_rotary_table(p: Patched) -> None:
    """A table of cosines as long as the default context, whose index is clamped so that nothing is read behind it."""
    p.positions(lambda positions: positions.clamp(max=255))


@bug(
    "rotation", accepted=("rope",), words="pair|neighbo|interleav|half|halves|neox|gpt-?j|even|odd|channel|layout",
    taps=ROTATED, model="llama", tp=2,
)  # fmt: skip
def neighbouring_channels_are_rotated_instead_of_halves(p: Patched) -> None:
    """is_neox_style is left at the value of the model that was copied from."""
    p.rotate(lambda apply, q, k, cos, sin: (by_neighbours(q, cos, sin), by_neighbours(k, cos, sin)))


@bug(
    "rotation", accepted=("rope", "positions", "precision"),
    words=FREQUENCIES + "|precis|round|bfloat|half|16|cast|position", taps=ROTATED, model="qwen3-long",
    dtype="bfloat16",
)  # fmt: skip
def angles_are_products_in_the_dtype_of_the_model(p: Patched) -> None:
    """Positions and inverse frequencies are multiplied under autocast: in bfloat16 positions beyond 256 collide."""

    def coarse(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        half = positions[..., None].to(x.dtype) * rotary.inv_freq.to(x.dtype)
        both = torch.cat((half, half), -1)
        return both.cos(), both.sin()

    p.angles(coarse)


@bug(
    "rope base", accepted=("rope", "positions"), words=FREQUENCIES, taps=ROTATED, model="qwen2-untied",
    dtype="bfloat16", tp=2,
)  # fmt: skip
def base_has_moved_within_the_config_and_its_default_is_taken(p: Patched) -> None:
    """`getattr(config, "rope_theta", 10000)` where newer configs keep it in rope_parameters."""
    p.frequencies(lambda old: 1e4 ** -(torch.arange(len(old)) / len(old)))


@bug(
    "rope scaling", accepted=("rope", "positions"), words=FREQUENCIES + "|linear|band|wavelength|llama|position",
    taps=ROTATED, model="llama-llama3", tp=2,
)  # fmt: skip
def scaling_of_llama3_is_run_as_linear(p: Patched) -> None:
    """A rope type that is not known has a factor, and that divides all frequencies."""
    p.frequencies(lambda old: 5e5 ** -(torch.arange(len(old)) / len(old)) / 8)


@bug(
    "partial rotation", accepted=("rope", "positions"),
    words="partial|rotat|part|whole|channel|dim|pair|half|share|frequen|all", taps=ROTATED, model="phi", tp=2, ep=1,
)  # fmt: skip
def whole_heads_are_rotated_where_a_part_should_be(p: Spoilt) -> None:
    """partial_rotary_factor is not read, so rotary_dim is the head's width."""
    p.rules(layer_rope=lambda model, layer: replace(model.of_layer(layer), rotary=None))


@bug(
    "layers", accepted=("rope", "positions", "layer", "layers", "skipped"),
    words="rotat|rope|position|nope|without|should not|no_rope", taps=ROTATED, layers=(1,), model="smollm3",
    dtype="bfloat16", ep=1,
)  # fmt: skip
def layers_without_positions_are_rotated_like_the_rest(p: Spoilt) -> None:
    """A Llama class runs SmolLM3: no_rope_layers is a field of the config that it does not know."""
    p.rules(layer_rope=lambda model, layer: model.of_layer(0))


@bug(
    "positions", accepted=("rope", "positions"), words="position|stale|same|old|behind|late|early|offset|angle|stuck",
    taps=ROTATED, step=2, model="qwen3", dtype="bfloat16",
)  # fmt: skip
def captured_graph_replays_the_positions_of_its_first_step(p: Patched) -> None:
    """The graph's static buffer of positions is filled at the capture and not copied into before a replay."""
    p.positions(lambda positions: positions - max(0, p.step - 1))


@bug(
    "order", accepted=("rope", "norm", "input"), words="order|before|after|behind|rotat|rope|position",
    taps=("attn.q_norm",), model="qwen3",
)  # fmt: skip
def norms_of_heads_are_applied_to_what_was_rotated(p: Patched) -> None:
    """A port from a model that has its norms of queries and keys behind the rotation."""
    for _, layer in p.layers():
        table: dict[str, Any] = {}

        def around(forward: Any, table: dict[str, Any] = table, **kwargs: Any) -> Any:
            table["angles"] = kwargs["position_embeddings"]
            return forward(**kwargs)

        p.wrap(layer.self_attn, around)
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            p.wrap(norm, lambda forward, x, table=table: forward(turned(x, *table["angles"])))
    p.rotate(lambda apply, q, k, cos, sin: (q, k))


# -- masks ---------------------------------------------------------------------------------------------------


@bug("window", accepted=("mask", "scores"), words=SEEN, taps=SCORES, model="mistral-window", tp=2)
def window_has_one_key_more(p: Patched) -> None:
    """FlashAttention's window counts the keys left of the query, and is given the model's window without the -1."""

    p.attention(allow=lambda allowed: allowed | F.pad(allowed, (0, 1))[..., 1:])


@bug(
    "mask", accepted=("mask", "scores"), words=SEEN + "|first|past|align", taps=SCORES, step=1, model="qwen3",
    dtype="bfloat16", tp=2,
)  # fmt: skip
def causal_mask_of_a_decode_step_begins_at_the_first_key(p: Patched) -> None:
    """`is_causal=True` with one query and many keys: the mask is aligned to the top left."""
    p.attention(allow=lambda allowed: torch.ones_like(allowed).tril())


# -- scores, softmax -----------------------------------------------------------------------------------------


@bug(
    "softmax", accepted=("softmax", "mask", "attention"),
    words="sum|denominator|normali|tail|page|padd|mask|zero|beside|further|extra|small", taps=PROBS, model="llama",
    dtype="bfloat16",
)  # fmt: skip
def tail_of_the_last_page_counts_in_the_softmax(p: Patched) -> None:
    """A kernel loads whole pages of 16, with zeros behind the last key, and does not mask the scores of these."""

    def over_pages(scores: Tensor) -> Tensor:
        keys = scores.shape[-1]
        whole = F.pad(scores, (0, -keys % 16)).softmax(-1, dtype=torch.float32)
        return whole[..., :keys].to(scores.dtype)

    p.attention(softmax=over_pages)


@bug(
    "heads", accepted=("heads", "keys", "values", "scores"), words="head|group|repeat|shar|interleav|gqa|kv",
    taps=SCORES, model="llama", tp=2,
)  # fmt: skip
def heads_of_the_cache_are_repeated_in_turn(p: Patched) -> None:
    """`repeat` in the place of `repeat_interleave`: query heads read KV head h % 2, not h // 2."""

    def tiled(kv: Tensor, groups: int) -> Tensor:
        return kv.repeat(1, groups, 1, 1)

    p.attention(keys=tiled, values=tiled)


@bug(
    "scale", accepted=("scale", "scores", "attention"),
    words="scal|factor|multipl|root|head_dim|width|sharp|large|1\\.4|times", taps=SCORES, model="qwen3", tp=4,
    dtype="bfloat16",
)  # fmt: skip
def scale_is_of_the_hidden_size_over_the_heads(p: Patched) -> None:
    """head_dim is computed as hidden_size // heads, where the config states another one."""
    p.attention(scale=lambda scores, scaling: scores * 8**-0.5)


@bug(
    "cap", accepted=("scores", "clip", "activation", "skipped", "scale", "attention"),
    words="cap|tanh|clip|limit|bound|squash|larg", taps=SCORES, model="gemma2", ep=1,
)  # fmt: skip
def scores_are_not_capped_by_the_faster_attention(p: Spoilt) -> None:
    """Gemma 2 on a kernel that has no soft cap: it was dropped without a word."""
    p.rules(soft_cap=lambda scores, cap: scores)
