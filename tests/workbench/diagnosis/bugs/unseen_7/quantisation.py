"""Quantised weights: scales, zero points, code tables."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched

#: The codes of bitsandbytes' NF4.
NF4 = torch.tensor(
    [
        *(-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0),
        *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0),
    ]
)


@bug(
    "quantisation",
    accepted=("weight", "scale", "sharding"),
    words="scale|factor|times|row|channel|rank|shard|quant",
    taps=("mlp.up",),
    ranks=(1,),
    model="llama",
    tp=2,
)
def row_scales_of_up_are_rank_0_s_on_both(p: Patched) -> None:
    for i, _ in p.layers():
        scales = p.full.model.layers[i].mlp.up_proj.weight.abs().amax(1, keepdim=True).chunk(2)
        if p.rank == 1:
            p.weight(p.mlp(i).up_proj, lambda w, scales=scales: w / scales[1] * scales[0])


@bug(
    "quantisation",
    accepted=("weight", "scale"),
    words="zero|offset|group|constant|quant|round|weight",
    taps=("attn.v_proj",),
    model="qwen2-untied",
    dtype="bfloat16",
)
def zero_points_of_groups_taken_for_eight(p: Patched) -> None:
    """Four bits, groups of sixteen; the loader believes that they are symmetric."""

    def change(w):
        groups = w.float().unflatten(1, (-1, 16))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = (high - low) / 15
        zero = (-low / scale).round()
        return (((groups / scale + zero).round() - 8) * scale).flatten(1).to(w.dtype)

    for i, _ in p.layers():
        p.weight(p.attn(i).v_proj, change)


@bug(
    "quantisation",
    accepted=("weight", "scale"),
    words="scale|factor|times|constant|magnitude",
    taps=("mlp.up",),
    model="mistral-window",
)
def up_dequantised_by_the_scale_of_gate(p: Patched) -> None:
    """Fused into one tensor that keeps one scale."""
    for i, _ in p.layers():
        mlp = p.mlp(i)
        ratio = mlp.gate_proj.weight.abs().max() / mlp.up_proj.weight.abs().max()
        p.weight(mlp.up_proj, lambda w, ratio=ratio: w * ratio)


@bug(
    "quantisation",
    accepted=("weight", "scale"),
    words="minimum|offset|constant|block|zero|group|quant|weight|shift",
    taps=("mlp.down",),
    model="llama-mha",
)
def minimum_of_each_block_left_out(p: Patched) -> None:
    """Q4_K has a minimum beside each scale, which Q4_0 has not."""

    def change(w):
        blocks = w.unflatten(1, (-1, 32))
        return (blocks - blocks.amin(-1, keepdim=True)).flatten(1)

    for i, _ in p.layers():
        p.weight(p.mlp(i).down_proj, change)


@bug(
    "quantisation",
    accepted=("weight", "precision"),
    words="weight|quant|code|table|NF4|round|4.bit|four|precis|bits",
    taps=("attn.q_proj",),
    layers=(1,),
    model="llama",
    dtype="bfloat16",
)
def nf4_codes_read_as_evenly_spaced(p: Patched) -> None:
    def change(w):
        scale = w.float().abs().amax(1, keepdim=True)
        codes = ((w.float() / scale)[..., None] - NF4).abs().argmin(-1)
        return (torch.linspace(-1, 1, 16)[codes] * scale).to(w.dtype)

    p.weight(p.attn(1).q_proj, change)
