"""Shards: what each rank holds."""

from __future__ import annotations

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import QKV, bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _whole(p, i):
    layer = p.full.model.layers[i]
    return layer.self_attn, layer.mlp


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard|order|row|permut|strid",
    taps=("mlp.gate", "mlp.up"),
    model="qwen3-bias",
    tp=2,
)
def gate_and_up_dealt_in_turn_down_in_blocks(p: Patched) -> None:
    for i, _ in p.layers():
        _, mlp = _whole(p, i)
        mine = slice(p.rank, None, p.tp)
        p.weight(p.mlp(i).gate_proj, lambda w, mlp=mlp, mine=mine: mlp.gate_proj.weight[mine].clone())
        p.weight(p.mlp(i).up_proj, lambda w, mlp=mlp, mine=mine: mlp.up_proj.weight[mine].clone())


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard|half|zero|row|head",
    taps=("attn.k_proj", "attn.v_proj"),
    model="qwen3",
    tp=4,
)
def kv_heads_cut_in_half_among_more_ranks_than_heads(p: Patched) -> None:
    """Each rank has half a head, and zeros in place of the other half."""
    for i, _ in p.layers():
        attn, _ = _whole(p, i)
        for name in ("k_proj", "v_proj"):
            rows = getattr(attn, name).weight[p.rank * 8 : p.rank * 8 + 8]
            p.weight(getattr(p.attn(i), name), lambda w, rows=rows: torch.cat([rows, 0 * rows]))


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard|layer",
    taps=("attn.v_proj",),
    ranks=(1,),
    model="llama-deep",
    tp=2,
)
def rank_1_is_one_layer_ahead_with_its_values(p: Patched) -> None:
    if p.rank == 1:
        for i, _ in p.layers(range(5)):
            attn, _ = _whole(p, i + 1)
            p.weight(p.attn(i).v_proj, lambda w, attn=attn: attn.v_proj.weight.chunk(2)[1].clone())


@bug(
    "sharding",
    accepted=("norm", "sharding"),
    words="norm|token|row|rank",
    taps=("mlp_norm",),
    model="llama",
    tp=2,
)
def odd_last_token_is_normed_on_no_rank(p: Patched) -> None:
    """The tokens are shared out for the norm, as many to each rank: the last of an odd number stays as it was."""
    for _, layer in p.layers():

        def around(forward, x):
            even = x.shape[1] // p.tp * p.tp
            return torch.cat([forward(x[:, :even]), x[:, even:]], 1)

        p.wrap(layer.post_attention_layernorm, around)


@bug(
    "bias",
    accepted=("bias", "sharding"),
    words="bias",
    taps=("attn.v_proj",),
    model="qwen2-untied",
    tp=2,
)
def bias_of_the_values_cut_for_twice_as_many_ranks(p: Patched) -> None:
    """By the number of all processes, of which half serve other requests; the rest is zero."""
    for i, _ in p.layers():
        bias = _whole(p, i)[0].v_proj.bias.detach()
        size = len(bias) // (2 * p.tp)
        mine = bias[p.rank * size : (p.rank + 1) * size]
        p.bias(p.attn(i).v_proj, lambda b, mine=mine: torch.cat([mine, 0 * mine]))


@bug(
    "sharding",
    accepted=("head", "sharding", "weight"),
    words="rank|tied|embedding|head|row",
    taps=("logits",),
    ranks=(3,),
    model="qwen2-untied",
    tp=4,
)
def rank_3_alone_ties_its_head(p: Patched) -> None:
    if p.rank == 3:
        p.weight(p.model.lm_head, lambda w: p.decoder.embed_tokens.weight.detach().clone())


@bug(
    "sharding",
    accepted=("weight", "sharding"),
    words="rank|weight|shard|checkpoint",
    taps=QKV,
    ranks=(1,),
    model="qwen3",
    tp=2,
)
def rank_1_missed_the_last_update_of_the_weights(p: Patched) -> None:
    """All its products hold what they were before a step of training."""
    if p.rank != 1:
        return
    generator = torch.Generator().manual_seed(5)
    for _, layer in p.layers():
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                p.weight(
                    module, lambda w: w + 0.05 * w.std() * torch.randn(w.shape, generator=generator).to(w)
                )
