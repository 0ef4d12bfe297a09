"""Rotary positions."""

from __future__ import annotations

import copy
import math

import torch

from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _half(x):
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


@bug(
    "positions",
    accepted=("positions", "rope"),
    words="position|offset|prompt",
    taps=ROTATED,
    step=1,
    model="qwen3-bias",
    tp=2,
)
def offset_grows_by_the_whole_prompt_after_the_first_token(p: Patched) -> None:
    """tiny-llm#46: all tokens known are added once more, and then one for each step."""
    p.positions(lambda at: at + p.model.prompt_lengths[p.seq] if p.decode else at)


@bug(
    "positions",
    accepted=("positions", "rope"),
    words="position|offset|tile|group|block|same|repeat|round",
    taps=ROTATED,
    model="llama",
    dtype="bfloat16",
)
def tile_of_four_tokens_is_turned_by_the_position_of_its_first(p: Patched) -> None:
    """vllm-ascend#16674: the positions are in registers, and one of them is read for all."""
    p.positions(lambda at: at if p.decode else at // 4 * 4)


@bug(
    "rope",
    accepted=("rope",),
    words="sin|table|rotat|RoPE|angle|norm|frequenc|cos",
    taps=ROTATED,
    model="mistral-full",
    dtype="float16",
)
def sines_begin_where_a_padded_row_would_have_them(p: Patched) -> None:
    """vllm-ascend#12723: a row holds cosines and then sines, eight each; the sines are read from the twelfth on."""

    def table(rotary, x, at):
        (cos, sin), (later, _) = rotary(x, at), rotary(x, at + 1)
        sin = torch.cat([sin[..., 4:8], later[..., :4]], -1)
        return cos, torch.cat([sin, sin], -1)

    p.angles(table)


@bug(
    "rope",
    accepted=("rope",),
    words="last|pair|sin|table|rotat|angle|frequenc|dimension|norm",
    taps=ROTATED,
    model="qwen2-untied",
    dtype="bfloat16",
)
def table_filled_up_with_ones_for_sines_too(p: Patched) -> None:
    """vllm#55204: it is one pair too short."""

    def table(rotary, x, at):
        cos, sin = (part.clone() for part in rotary(x, at))
        for part in (cos, sin):
            part[..., 3] = part[..., 7] = 1
        return cos, sin

    p.angles(table)


@bug(
    "rope",
    accepted=("rope",),
    words="scal|factor|frequenc|theta|base|angle",
    taps=ROTATED,
    model="llama-bias",
)
def factors_of_a_long_rope_divide_the_frequencies(p: Patched) -> None:
    """One for each pair, as Phi-3 has them; the configuration of this model has none."""
    p.frequencies(lambda inverse: inverse / torch.tensor([1.0, 1.1, 1.5, 3.0]))


@bug(
    "positions",
    accepted=("positions", "rope"),
    words="position|offset|chunk|restart|reset",
    taps=("attn.q_rope",),
    model="qwen2-kv8",
    dtype="bfloat16",
)
def queries_of_the_second_chunk_begin_at_zero_and_its_keys_do_not(p: Patched) -> None:
    """Chunks of eight; the keys are turned when they are written, by the slot."""

    def rotate(apply, q, k, cos, sin):
        right, k = apply(q, k, cos, sin)
        if p.decode:
            return right, k
        cos, sin = (part[:, None] for part in p.decoder.rotary_emb(q, torch.arange(p.new)[None] % 8))
        return q * cos + _half(q) * sin, k

    p.rotate(rotate)


@bug(
    "positions",
    accepted=("positions", "rope"),
    words="position|offset|group|divid|scal|beyond|grow|256",
    taps=ROTATED,
    model="qwen3-long",
)
def positions_beyond_256_grow_with_every_fourth_token(p: Patched) -> None:
    """Self-extend was left on: in groups of four."""
    p.positions(lambda at: at.where(at <= 256, 256 + (at - 256) // 4))


@bug(
    "rope",
    accepted=("rope", "cache", "positions"),
    words="rotat|twice|again|double|RoPE|turn|position",
    taps=("attn.k_cache",),
    layers=(1,),
    step=1,
    model="llama-mha",
    tp=2,
)
def one_layer_rotates_the_prompt_s_keys_again_when_it_reads_them(p: Patched) -> None:
    """Its cache is that of an engine which keeps keys as they were before."""

    def read(k, v):
        if not p.decode:
            return k, v
        prompt = torch.arange(k.shape[2] - p.step)[None]
        cos, sin = (part[:, None] for part in p.decoder.rotary_emb(k, prompt))
        old = k[:, :, prompt[0]]
        return torch.cat([old * cos + _half(old) * sin, k[:, :, -p.step :]], 2), v

    p.cache((1,), read=read)


@bug(
    "rope",
    accepted=("rope",),
    words="pair|half|halves|head|rotat|across|partner|interleav|neighbour",
    taps=ROTATED,
    model="qwen2-tied",
)
def halves_are_those_of_the_row_and_not_of_each_head(p: Patched) -> None:
    """rotate_half runs before the heads are told apart: a dimension's partner is half of all heads away."""

    def turned(x, cos, sin):
        other = _half(x.transpose(1, 2).flatten(2)).unflatten(2, (-1, x.shape[-1])).transpose(1, 2)
        return x * cos[:, None] + other * sin[:, None]

    p.rotate(lambda apply, q, k, cos, sin: (turned(q, cos, sin), turned(k, cos, sin)))


@bug(
    "positions",
    accepted=("positions", "rope"),
    words="position|offset|sequence",
    taps=ROTATED,
    step=1,
    model="llama-three",
)
def batch_is_sorted_by_length_for_decode_and_its_positions_twice(p: Patched) -> None:
    """Longest first; what is handed out by row belongs to another sequence."""

    def change(at):
        lengths = sorted(p.model.prompt_lengths, reverse=True)
        return torch.full_like(at, lengths[p.seq] + p.step - 1) if p.decode else at

    p.positions(change)


@bug(
    "rope",
    accepted=("rope",),
    words="scal|llama3|factor|frequenc",
    taps=ROTATED,
    model="llama-llama3",
    tp=2,
)
def second_sequence_turns_by_the_table_without_its_scaling(p: Patched) -> None:
    """Two tables are kept, and the one for short contexts is taken for a short prompt."""

    def table(rotary, x, at):
        plain = copy.deepcopy(rotary)
        if p.seq == 1:
            plain.inv_freq = 5e5 ** -(torch.arange(0, 8, 2) / 8)
        return plain(x, at)

    p.angles(table)


@bug(
    "rope",
    accepted=("rope", "scale"),
    words="attention.factor|scal|factor|magnitude|mscale|yarn",
    taps=ROTATED,
    ranks=(1,),
    model="llama-yarn",
    tp=4,
)
def rank_1_takes_yarn_s_factor_from_a_logarithm_to_ten(p: Patched) -> None:
    if p.rank == 1:
        p.frequencies(lambda inverse: inverse, factor=0.1 * math.log10(8) + 1)
