"""Quantised weights: codes, scales, zero points, the order within a block."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "quantisation",
    accepted=("weight", "scale", "bias"),
    words="zero.point|group|block|weight|offset|minimum|scale|code|element",
    taps=("mlp.gate",),
    model="llama",
)
def zero_points_of_zero_wrap_around_to_fifteen(p: Patched) -> None:
    """GPTQModel#2350: one is taken off before they are packed; groups of four inputs, so that some have no minus."""

    def change(w):
        groups = w.unflatten(1, (-1, 4))
        highest = groups.amax(-1, keepdim=True)
        return groups.where(groups.amin(-1, keepdim=True) < 0, groups - highest).flatten(1)

    for i, _ in p.layers():
        p.weight(p.mlp(i).gate_proj, change)


@bug(
    "quantisation",
    accepted=("weight", "scale", "bias"),
    words="zero.point|group|block|weight|offset|minimum|scale|column",
    taps=("attn.v_proj",),
    model="mistral-full",
)
def every_second_group_takes_the_zero_points_of_the_one_before(p: Patched) -> None:
    """sglang#37759: a tile spans two groups of sixteen inputs, and those of the first are loaded."""

    def change(w):
        groups = w.unflatten(1, (-1, 16))
        lowest, highest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        step = (highest - lowest) / 15
        zeros = (-lowest / step).round()
        return (groups + step * (zeros - zeros[:, torch.arange(4) // 2 * 2])).flatten(1)

    for i, _ in p.layers():
        p.weight(p.attn(i).v_proj, change)


@bug(
    "quantisation",
    accepted=("weight",),
    words="order|permut|column|row|interleav|weight|element|input",
    taps=("mlp.up",),
    model="qwen2-tied",
    dtype="bfloat16",
)
def four_weights_of_a_byte_taken_sixteen_apart(p: Patched) -> None:
    """GPTQModel#3058: two bits each, of four neighbours; blocks of 64 inputs."""
    for i, _ in p.layers():
        p.weight(
            p.mlp(i).up_proj, lambda w: w.unflatten(1, (-1, 16, 4)).transpose(2, 3).flatten(1).contiguous()
        )


@bug(
    "quantisation",
    accepted=("weight",),
    words="sign|magnitude|absolute|positive|weight|column|input",
    taps=("mlp.gate",),
    model="qwen3-bias",
)
def eighth_sign_of_each_group_never_made_of_the_others(p: Patched) -> None:
    """Seven are stored, and the eighth keeps their number even; it is always plus."""

    def change(w):
        w[:, 7::8] = w[:, 7::8].abs()
        return w

    for i, _ in p.layers():
        p.weight(p.mlp(i).gate_proj, change)


@bug(
    "quantisation",
    accepted=("weight", "scale", "bias"),
    words="minimum|block|scale|weight|offset|zero.point|group",
    taps=("attn.k_proj",),
    model="mistral-window",
    dtype="bfloat16",
)
def minima_of_the_blocks_scaled_by_the_factor_of_the_scales(p: Patched) -> None:
    """`d` for `dmin`, which is twice as large; blocks of 32 inputs."""

    def change(w):
        blocks = w.unflatten(1, (-1, 32))
        return (blocks - blocks.amin(-1, keepdim=True) / 2).flatten(1)

    for i, _ in p.layers():
        p.weight(p.attn(i).k_proj, change)


@bug(
    "numbers",
    accepted=("precision", "weight"),
    words="round|trunc|precis|bfloat16|bf16|bits|mantissa",
    taps=("mlp.up",),
    model="llama-yarn",
)
def lower_halves_of_the_words_of_up_cut_off(p: Patched) -> None:
    """bfloat16 by leaving out 16 bits, without rounding."""
    for i, _ in p.layers():
        p.weight(p.mlp(i).up_proj, lambda w: (w.view(torch.int32) & ~0xFFFF).view(torch.float32))


@bug(
    "quantisation",
    accepted=("weight", "scale"),
    words="scale|factor|block|group|power|weight|magnitude",
    taps=("mlp.up",),
    model="qwen3",
    tp=2,
)
def scales_of_the_blocks_kept_as_powers_of_two(p: Patched) -> None:
    """Codes were made with the exact ones; blocks of sixteen inputs."""

    def change(w):
        blocks = w.unflatten(1, (-1, 16))
        scale = blocks.abs().amax(-1, keepdim=True) / 6
        return (blocks / scale * 2 ** scale.log2().ceil()).flatten(1)

    for i, _ in p.layers():
        p.weight(p.mlp(i).up_proj, change)


@bug(
    "quantisation",
    accepted=("weight", "scale"),
    words="scale|factor|group|column|weight|magnitude|code|input",
    taps=("mlp.down",),
    model="qwen2-three",
)
def last_group_of_down_is_not_whole_and_stays_in_codes(p: Patched) -> None:
    """Groups of 64 inputs, of which 96 are one and a half; there are as many scales as whole groups."""

    def change(w):
        w[:, 64:] /= w[:, 64:].abs().amax(1, keepdim=True) / 7
        return w

    for i, _ in p.layers():
        p.weight(p.mlp(i).down_proj, change)
