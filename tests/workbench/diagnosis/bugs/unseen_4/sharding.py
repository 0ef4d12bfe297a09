"""What each rank holds."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard",
    taps=("mlp.up",),
    ranks=(2,),
    model="mistral-full",
    tp=4,
)
def rank_2_loads_the_up_of_rank_1(p: Patched) -> None:
    if p.rank == 2:
        for i, _ in p.layers():
            p.weight(
                p.mlp(i).up_proj, lambda w, i=i: p.full.model.layers[i].mlp.up_proj.weight[24:48].clone()
            )


@bug(
    "sharding",
    accepted=("sharding", "weight", "heads"),
    words="rank|shard|zero|replica|empty|copy|load",
    taps=("attn.k_proj", "attn.v_proj"),
    ranks=(1, 3),
    model="qwen2-tied",
    tp=4,
)
def replicas_of_the_kv_heads_stay_empty(p: Patched) -> None:
    if p.rank % 2:
        for i, _ in p.layers():
            for side in (p.attn(i).k_proj, p.attn(i).v_proj):
                p.weight(side, torch.zeros_like)
                p.bias(side, torch.zeros_like)


@bug(
    "sharding",
    accepted=("bias", "sharding"),
    words="rank|shard|bias",
    taps=("attn.q_proj",),
    ranks=(1, 2, 3),
    model="qwen2-untied",
    tp=4,
)
def every_rank_has_the_first_part_of_the_bias_of_q(p: Patched) -> None:
    for i, _ in p.layers():
        whole = p.full.model.layers[i].self_attn.q_proj.bias.detach()
        p.bias(p.attn(i).q_proj, lambda b, whole=whole: whole[: len(b)].clone())


@bug(
    "sharding",
    accepted=("bias", "sharding", "reduce"),
    words="bias",
    taps=("mlp.down",),
    model="llama-bias",
    dtype="bfloat16",
    tp=2,
)
def bias_of_down_forgotten_when_it_is_cut(p: Patched) -> None:
    for i, _ in p.layers():
        p.mlp(i).down_proj.bias = None


@bug(
    "sharding",
    accepted=("embedding", "sharding", "weight"),
    words="row|id|token|zero|rank|shard|last|edge|bound",
    taps=("embed",),
    model="llama",
    tp=2,
)
def last_id_of_each_shard_taken_for_a_foreign_one(p: Patched) -> None:
    def zero(w):
        w[-1] = 0
        return w

    p.weight(p.decoder.embed_tokens, zero)


@bug(
    "sharding",
    accepted=("head", "sharding"),
    words="rank|order|shard|swap|exchang|vocab",
    taps=("logits",),
    ranks=(1, 2),
    model="llama",
    tp=4,
)
def head_shards_of_the_middle_ranks_exchanged(p: Patched) -> None:
    head = p.full.lm_head.weight.detach()
    if p.rank in (1, 2):
        first = 33 * (3 - p.rank)
        p.weight(p.model.lm_head, lambda w: head[first : first + 33].clone())


@bug(
    "sharding",
    accepted=("norm", "weight", "sharding"),
    words="weight|rank|layer|norm",
    taps=("attn_norm",),
    layers=(1, 2),
    ranks=(1,),
    model="mistral-window",
    tp=2,
)
def rank_1_has_the_first_layer_s_norm_in_every_layer(p: Patched) -> None:
    if p.rank == 1:
        first = p.decoder.layers[0].input_layernorm.weight.detach()
        for _, layer in p.layers((1, 2)):
            p.weight(layer.input_layernorm, lambda w: first.clone())


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard|column|offset|shift|group",
    taps=("mlp.down.partial", "mlp.down"),
    ranks=(1,),
    model="qwen3",
    tp=2,
)
def rank_1_begins_at_the_last_whole_group_of_down(p: Patched) -> None:
    """96 columns in groups of 32: half of them is no whole number of groups."""
    if p.rank == 1:
        for i, _ in p.layers():
            whole = p.full.model.layers[i].mlp.down_proj.weight.detach()
            p.weight(p.mlp(i).down_proj, lambda w, whole=whole: whole[:, 32:80].clone())


@bug(
    "sharding",
    accepted=("norm",),
    words="skip|not (been )?(normed|applied|normalised)|never|without|missing|identity|rank",
    taps=("attn.q_norm",),
    ranks=(1,),
    model="qwen3-kv4",
    tp=2,
)
def rank_1_never_norms_its_queries(p: Patched) -> None:
    if p.rank == 1:
        for i, _ in p.layers():
            p.attn(i).q_norm.forward = lambda x: x
