"""Quantised weights and inputs."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "quantisation",
    accepted=("weight", "scale"),
    words="weight|scale|row|factor",
    taps=("mlp.up",),
    model="llama",
)
def last_partial_block_of_rows_takes_the_scale_of_the_first(p: Patched) -> None:
    """Blocks of 64 x 32: 96 rows are one and a half, of which one is counted."""

    def change(w):
        w = w.clone()
        for block in w.split(32, 1):
            first, last = block[:64], block[64:]
            last *= first.abs().amax() / last.abs().amax()
        return w

    for i, _ in p.layers():
        p.weight(p.mlp(i).up_proj, change)


@bug(
    "quantisation",
    accepted=("weight",),
    words="weight|bit|quantis|checkpoint",
    taps=("attn.v_proj",),
    layers=(2,),
    model="qwen2-tied",
)
def upper_two_of_six_bits_never_joined(p: Patched) -> None:
    """Only the values and down of the last layer are stored in six bits, in groups of 16."""

    def change(w):
        groups = w.unflatten(1, (-1, 16))
        scale = groups.abs().amax(-1, keepdim=True) / 31
        codes = ((groups / scale).round() + 32).int() & 15
        return ((codes - 32) * scale).flatten(1)

    p.weight(p.attn(2).v_proj, change)
    p.weight(p.mlp(2).down_proj, change)


@bug(
    "quantisation",
    accepted=("weight", "scale"),
    words="scale|factor|twice|times|weight|double",
    taps=("attn.o_proj",),
    layers=(1,),
    model="qwen3-kv4",
    dtype="bfloat16",
)
def exponents_of_the_block_scales_read_with_another_bias(p: Patched) -> None:
    """Every scale is twice what it was, in the one layer of that format."""
    p.weight(p.attn(1).o_proj, lambda w: 2 * w)


@bug(
    "quantisation",
    accepted=("input", "scale", "precision"),
    words="scale|token|row|input|factor",
    taps=("mlp.gate", "mlp.up"),
    model="mistral-full",
    dtype="bfloat16",
)
def each_token_takes_the_scale_of_the_one_before(p: Patched) -> None:
    """The inputs go through eight bits, and the product is scaled back by the neighbour's scale."""

    def change(x):
        scale = x.abs().amax(-1, keepdim=True) / 127
        before = torch.cat([scale[:, :1], scale[:, :-1]], 1)
        return (x / scale).round() * before

    for i, _ in p.layers():
        p.input(p.mlp(i).gate_proj, change)
        p.input(p.mlp(i).up_proj, change)


@bug(
    "quantisation",
    accepted=("input", "precision", "overflow", "scale"),
    words="clip|clamp|saturat|range|input|limit",
    taps=("mlp.down",),
    model="llama",
    tp=4,
)
def input_of_down_saturates_at_its_calibrated_range(p: Patched) -> None:
    """A static scale, calibrated on other texts."""
    for i, _ in p.layers():
        p.input(p.mlp(i).down_proj, lambda x: x.clamp(-1, 1))
