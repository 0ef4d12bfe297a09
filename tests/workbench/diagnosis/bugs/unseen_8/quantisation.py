"""Quantised weights: scales, codes, the order within a block."""

from __future__ import annotations

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "quantisation",
    accepted=("weight", "scale", "sharding"),
    words="scale|factor|times|constant|magnitude|row|channel",
    taps=("attn.v_proj",),
    ranks=(2,),
    model="llama",
    tp=4,
)
def rank_2_multiplies_by_the_codes_of_its_values(p: Patched) -> None:
    """Eight bits with a scale for each row, of which the third shard's never arrived and stayed at one."""
    if p.rank == 2:
        for i, _ in p.layers():
            p.weight(p.attn(i).v_proj, lambda w: (w / (w.abs().amax(1, keepdim=True) / 127)).round())


@bug(
    "quantisation",
    accepted=("weight", "scale"),
    words="scale|block|group|factor|weight|quant|magnitude",
    taps=("mlp.gate",),
    layers=(1,),
    model="qwen3",
)
def upper_bits_of_the_block_scales_left_out(p: Patched) -> None:
    """aprender#2115: blocks of 16, whose scale has six bits, of which four are read."""

    def change(w):
        blocks = w.unflatten(1, (-1, 16))
        scales = blocks.abs().amax(-1, keepdim=True)
        unit = scales.amax(1, keepdim=True) / 63
        codes = (scales / unit).round()
        return (blocks / codes * (codes % 16)).flatten(1)

    p.weight(p.mlp(1).gate_proj, change)


@bug(
    "quantisation",
    accepted=("weight",),
    words="order|permut|column|row|interleav|weight|element",
    taps=("mlp.down",),
    model="mistral-full",
)
def halves_of_each_block_read_as_pairs(p: Patched) -> None:
    """aprender#1621: the low nibbles are elements 0 to 15 of a block, the high ones 16 to 31."""
    for i, _ in p.layers():
        p.weight(
            p.mlp(i).down_proj,
            lambda w: w.unflatten(1, (-1, 2, 16)).transpose(2, 3).flatten(1).contiguous(),
        )


@bug(
    "quantisation",
    accepted=("head", "weight"),
    words="weight|group|column|repeat|block|row|head|input",
    taps=("logits",),
    model="qwen2-untied",
    dtype="bfloat16",
)
def every_group_of_the_head_reads_the_codes_of_the_first(p: Patched) -> None:
    """1bit-MONSTER#153: the index of a nibble goes by its column within the group."""

    def change(w):
        groups = w.unflatten(1, (-1, 16))
        scales = groups.abs().amax(-1, keepdim=True)
        return (groups[:, :1] / scales[:, :1] * scales).flatten(1)

    p.weight(p.model.lm_head, change)


@bug(
    "quantisation",
    accepted=("weight", "scale", "sharding"),
    words="scale|block|group|factor|row|rank|weight|shard",
    taps=("mlp.gate",),
    ranks=(1,),
    model="llama-bias",
    tp=2,
)
def block_scales_of_rank_1_counted_from_its_own_first_row(p: Patched) -> None:
    """vllm#52997: its 48 rows begin in the middle of a block of 32, and the last 16 take its scale too."""

    def change(w, whole):
        scales = whole.view(3, 32, -1).abs().amax((1, 2))
        w[16:32] *= scales[1] / scales[2]
        return w

    if p.rank == 1:
        for i, _ in p.layers():
            whole = p.full.model.layers[i].mlp.gate_proj.weight.detach()
            p.weight(p.mlp(i).gate_proj, lambda w, whole=whole: change(w, whole))
