"""Rotary positions."""

from __future__ import annotations

import math

import torch

from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _half(x):
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


def _neighbours(x, cos, sin):
    """Pairs (2i, 2i + 1) turned by the table of pairs (i, i + d/2)."""
    cos, sin = (table[:, None, :, : x.shape[-1] // 2] for table in (cos, sin))
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


@bug(
    "rope",
    accepted=("rope",),
    words="not rotated|never|without|skip|unrotated|missing|identity|not applied",
    taps=ROTATED,
    ranks=(2,),
    model="llama-mha",
    tp=4,
)
def rank_2_swallows_the_error_and_rotates_nothing(p: Patched) -> None:
    if p.rank == 2:
        p.rotate(lambda apply, q, k, cos, sin: (q, k))


@bug(
    "rope",
    accepted=("rope",),
    words="interleav|neighbour|adjacent|pairs|halves",
    taps=("attn.k_rope",),
    heads=(3,),
    model="llama",
    dtype="bfloat16",
)
def last_kv_head_turned_by_neighbouring_pairs(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        q, right = apply(q, k, cos, sin)
        return q, torch.cat([right[:, :3], _neighbours(k[:, 3:], cos, sin)], 1)

    p.rotate(rotate)


@bug(
    "rope",
    accepted=("rope",),
    words="scal|llama3|linear|frequenc|factor",
    taps=ROTATED,
    model="llama-llama3",
)
def llama3_scaling_taken_for_linear(p: Patched) -> None:
    """mlxcel#1688: only the factor is read, and every frequency divided by it."""
    p.frequencies(lambda inverse: 5e5 ** -(torch.arange(0, 8, 2) / 8) / 8)


@bug(
    "rope",
    accepted=("rope", "scores", "positions"),
    words="twice|double|again|rotat|RoPE|position|two",
    taps=("attn.scores",),
    model="llama",
)
def kernel_rotates_again_what_was_rotated(p: Patched) -> None:
    """TensorRT-LLM#4040: the cache holds keys that were rotated once."""

    def product(q, k):
        at = torch.arange(k.shape[2])[None]
        cos, sin = (table[:, None] for table in p.decoder.rotary_emb(q, at))
        k = k * cos + _half(k) * sin
        cos, sin = cos[:, :, -q.shape[2] :], sin[:, :, -q.shape[2] :]
        return (q * cos + _half(q) * sin) @ k.transpose(2, 3)

    p.attention(product=product)


@bug(
    "rope",
    accepted=("rope", "positions", "heads"),
    words="position|head|index|offset",
    taps=ROTATED,
    step=1,
    model="qwen3-kv4",
    dtype="bfloat16",
)
def decoded_heads_turned_by_their_own_index_too(p: Patched) -> None:
    """emlx#121: with one token the kernel counts along the heads."""

    def rotate(apply, q, k, cos, sin):
        q, k = apply(q, k, cos, sin)
        if not p.decode:
            return q, k

        def further(x):
            at = torch.arange(x.shape[1])[None]
            more_cos, more_sin = (table[:, :, None] for table in p.decoder.rotary_emb(x, at))
            return x * more_cos + _half(x) * more_sin

        return further(q), further(k)

    p.rotate(rotate)


@bug(
    "rope",
    accepted=("rope", "scale"),
    words="attention.factor|scal|factor|magnitude|mscale|yarn",
    taps=ROTATED,
    step=1,
    model="llama-yarn",
    tp=2,
)
def yarn_attention_factor_left_out_of_decode(p: Patched) -> None:
    def table(rotary, x, at):
        cos, sin = rotary(x, at)
        factor = rotary.attention_scaling if p.decode else 1
        return cos / factor, sin / factor

    p.angles(table)


@bug(
    "rope",
    accepted=("positions", "rope"),
    words="position|offset|stuck|zero|not rotated|unrotated|never|without",
    taps=ROTATED,
    step=1,
    model="mistral-full",
    tp=2,
)
def second_sequence_decodes_at_position_zero(p: Patched) -> None:
    p.positions(lambda at: 0 * at if p.decode and p.seq == 1 else at)


@bug(
    "rope",
    accepted=("positions", "rope"),
    words="position|offset|layer",
    taps=ROTATED,
    layers=(1, 2, 3, 4, 5),
    step=1,
    model="llama-deep",
)
def each_layer_counts_the_decoded_token_again(p: Patched) -> None:
    """flash-linear-attention#766: the count is raised by every layer's cache, not by the first alone."""
    for i, _ in p.layers():
        p.positions(lambda at, i=i: at + i * int(p.decode), (i,))


@bug(
    "rope",
    accepted=("rope",),
    words="not rotated|never|without|unrotated|missing|identity|not applied|frequenc|zero",
    taps=ROTATED,
    model="qwen2-tied",
    dtype="bfloat16",
)
def inverse_frequencies_left_empty_by_a_load_from_meta(p: Patched) -> None:
    """transformers#34234, executorch#19627: the buffer is in no checkpoint, and here it is zero."""
    p.frequencies(torch.zeros_like)


@bug(
    "rope",
    accepted=("positions", "rope"),
    words="position|offset|sum",
    taps=ROTATED,
    step=1,
    model="qwen3-bias",
    dtype="bfloat16",
    tp=2,
)
def decode_sums_the_positions_of_the_batch(p: Patched) -> None:
    """transformers#29109: the product of frequencies and positions has no dimension for the batch."""

    def change(at):
        other = p.model.prompt_lengths[1 - p.seq] - 1 + p.step
        return at + other if p.decode else at

    p.positions(change)


@bug(
    "rope",
    accepted=("rope",),
    words="yarn|scal|frequenc|factor",
    taps=ROTATED,
    model="mistral-full",
    tp=2,
)
def yarn_left_on_from_a_run_with_a_longer_context(p: Patched) -> None:
    """By a factor of four over 32 positions, with its attention factor; the checkpoint has no scaling."""

    def change(inverse):
        pairs = torch.arange(len(inverse))
        low, high = (8 * math.log(32 / (turns * 2 * math.pi)) / math.log(1e4) for turns in (32, 1))
        ramp = ((pairs - max(low, 0)) / (high - max(low, 0))).clamp(0, 1)
        return inverse / 4 * ramp + inverse * (1 - ramp)

    p.frequencies(change, factor=0.1 * math.log(4) + 1)
