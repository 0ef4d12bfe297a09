"""Linear weights: quantised formats read wrongly, adapters, conversions, kernels with tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import QKV, bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "weights",
    accepted=("weight", "scale"),
    words="scale|group|column|quant|permut|order|input|block",
    taps=("mlp.gate",),
    model="llama",
)
def groups_of_act_order_read_in_sequence(p: Patched) -> None:
    """GPTQ with `desc_act`: column i has the scale of group g_idx[i], and is given that of group i // 16."""
    for i, _ in p.layers():
        group = torch.randperm(64).argsort() // 16

        def read(w: Tensor, group: Tensor = group) -> Tensor:
            scales = torch.stack([w[:, group == g].abs().amax(1) for g in range(4)], 1)
            return w / scales[:, group] * scales.repeat_interleave(16, 1)

        p.weight(p.mlp(i).gate_proj, read)


@bug(
    "weights",
    accepted=("weight",),
    words="sign|quant|\\bbits?\\b|offset|negative|16",
    taps=("attn.v_proj",),
    layers=(0,),
    model="mistral-full",
)
def four_bit_weights_read_without_their_sign(p: Patched) -> None:
    p.weight(p.attn(0).v_proj, lambda w: w + (w < 0) * 16 * (w.abs().amax() / 8))


@bug(
    "weights",
    accepted=("weight",),
    words="offset|minim|zero.point|block|group|quant|constant|shift",
    taps=("mlp.up",),
    layers=(1,),
    model="qwen3",
    dtype="bfloat16",
)
def minimum_of_each_block_added_in_place_of_subtracted(p: Patched) -> None:
    """d · q + m for d · q - m, in blocks of 32 inputs."""

    def read(w: Tensor) -> Tensor:
        blocks = w.view(len(w), -1, 32)
        return (blocks - 2 * blocks.amin(-1, keepdim=True)).view_as(w)

    p.weight(p.mlp(1).up_proj, read)


@bug(
    "weights",
    accepted=("weight",),
    words="low.rank|rank.\\d|adapter|LoRA",
    taps=("attn.q_proj", "attn.v_proj"),
    model="qwen2-untied",
)
def adapter_merged_by_alpha_over_the_root_of_its_rank(p: Patched) -> None:
    """The checkpoint holds base + 16 / 8 · B A; the engine merges 16 / sqrt(8) · B A."""
    surplus = 16 / 8**0.5 - 16 / 8
    for i, _ in p.layers():
        for side in (p.attn(i).q_proj, p.attn(i).v_proj):
            delta = torch.randn(side.out_features, 8) @ torch.randn(8, 64) / 160
            p.weight(side, lambda w, delta=delta: w + surplus * delta)


@bug(
    "bias",
    accepted=("bias", "scale"),
    words="scal|factor|times|multipl|quarter|0\\.25|1/4",
    taps=("mlp.gate",),
    layers=(1,),
    model="llama-bias",
)
def bias_multiplied_by_the_scale_of_the_product(p: Patched) -> None:
    """It is added to the integers, before they are scaled."""
    p.bias(p.mlp(1).gate_proj, lambda b: b / 4)


@bug(
    "weights",
    accepted=("weight",),
    words="order|permut|row|interleav",
    taps=("attn.k_proj",),
    model="llama",
)
def rows_of_k_permuted_by_the_number_of_query_heads(p: Patched) -> None:
    """The converter interleaves the halves of eight heads, the engine undoes that of four."""

    def converted(w: Tensor) -> Tensor:
        inputs = w.shape[1]
        written = w.view(8, 2, -1, inputs).transpose(1, 2).reshape(w.shape)
        return written.view(4, -1, 2, inputs).transpose(1, 2).reshape(w.shape)

    for i, _ in p.layers():
        p.weight(p.attn(i).k_proj, converted)


@bug(
    "weights",
    accepted=("weight", "scale"),
    words="column|input|twice|tile|factor|scale|times|feature|double",
    taps=("mlp.down",),
    model="llama",
)
def last_tile_of_down_overlaps_the_one_before(p: Patched) -> None:
    """Tiles of 64 inputs; the last of 96 is pushed back to 32 … 95 without masking what has been counted."""

    def twice(w: Tensor) -> Tensor:
        w[:, 32:64] *= 2
        return w

    for i, _ in p.layers():
        p.weight(p.mlp(i).down_proj, twice)


@bug(
    "weights",
    accepted=("weight",),
    words="zero|row|feature|output|column|channel",
    taps=("mlp.up",),
    step=1,
    model="mistral-full",
)
def matrix_vector_kernel_ends_before_the_last_rows_of_up(p: Patched) -> None:
    written = torch.arange(96) < 88
    for i, _ in p.layers():
        p.output(p.mlp(i).up_proj, lambda y: y * written if p.decode else y)


@bug(
    "weights",
    accepted=("weight", "input", "norm", "scale"),
    words="column|scale|input|factor|smooth|feature|norm",
    taps=QKV,
    layers=(1,),
    model="qwen2-tied",
)
def smoothing_folded_into_the_weights_but_not_into_the_norm(p: Patched) -> None:
    """SmoothQuant multiplies the columns by what it takes from the norm's weight."""
    factors = (0.3 * torch.randn(64)).exp()
    for name in ("q_proj", "k_proj", "v_proj"):
        p.weight(getattr(p.attn(1), name), lambda w: w * factors)
