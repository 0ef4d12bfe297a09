"""Weights and biases that are not those of the module, the rank or the layout they are used in."""

from __future__ import annotations

import torch

from lockstep.engine.config import ModelConfig
from lockstep.engine.layers.attention import Attention
from lockstep.engine.model import Decoder
from lockstep.engine.parallel import shards
from tests.workbench.diagnosis.bugs.bug import QKV, bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt
from tests.workbench.diagnosis.bugs.patched import Patched

NORMED = ("attn.q_norm", "attn.k_norm")


@bug(
    "fused rows",
    accepted=("weight", "heads", "sharding", "linear"),
    words="row|head|order|weight|group|permut|column|place|layout|slot|interleav",
    taps=QKV,
    model="phi3",
    ep=1,
)
def fused_rows_are_read_group_by_group(p: Spoilt) -> None:
    """RL#2802, Megatron-Bridge#1818: queries, key and value of each group in turn, where they lie one by
    one.
    """

    def spoil(decoder: Decoder) -> None:
        for layer in decoder.layers:
            one = layer.attention
            assert isinstance(one, Attention)
            q, k, v = one.qkv.weight.parts().values()
            groups, width = one.kv_heads, one.head_dim
            rows = torch.cat((q, k, v)).unflatten(0, (groups, -1, width))
            q.copy_(rows[:, :-2].flatten(0, 2))
            k.copy_(rows[:, -2].flatten(0, 1))
            v.copy_(rows[:, -1].flatten(0, 1))

    p.loaded(spoil)


@bug(
    "fused rows",
    accepted=("weight", "linear", "sharding"),
    words="row|order|weight|interleav|permut|column|place|layout|slot|every|gate|up|alternat",
    taps=("mlp.gate", "mlp.up"),
    model="glm4",
    ep=1,
)
def gate_and_up_are_read_row_by_row(p: Spoilt) -> None:
    """The reader of gpt-oss, whose gate and up lie in turn, for a gate_up_proj in which they lie one by
    one.
    """

    def spoil(decoder: Decoder) -> None:
        for layer in decoder.layers:
            gate, up = layer.mlp.gate_up.weight.parts().values()
            rows = torch.cat((gate, up))
            gate.copy_(rows[0::2])
            up.copy_(rows[1::2])

    p.loaded(spoil)


def _of_first_rank(*names: str) -> shards.ShardPlan:
    """Parameters of these names: the first rank's part on every rank."""

    def plan(name: str, model: ModelConfig, tp: int, rank: int, ep: int = 1) -> shards.Shard:
        return shards.plan(name, model, tp, 0 if name.endswith(names) else rank, ep)

    return plan


@bug(
    "shards",
    accepted=("sharding", "weight", "softmax"),
    words="sink|shard|rank|weight|head|softmax|sum|other|slice|part",
    taps=("attn.probs",),
    ranks=(1,),
    model="gpt-oss",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def sinks_of_the_first_heads_are_on_every_rank(p: Spoilt) -> None:
    """`sinks[:heads_per_rank]`: right on one GPU, and on the first."""
    p.rules(shard=_of_first_rank(shards.SINKS))


@bug(
    "shards",
    accepted=("sharding", "weight", "norm"),
    words="shard|rank|weight|norm|slice|part|other|head",
    taps=NORMED,
    ranks=(1,),
    model="olmo3",
    tp=2,
    ep=1,
)
def norms_of_all_heads_are_cut_for_the_first_rank(p: Spoilt) -> None:
    """A norm's weight is narrowed to what the parameter holds, from 0 on."""
    p.rules(shard=_of_first_rank("q_norm.weight", "k_norm.weight"))


@bug(
    "shards",
    accepted=("bias", "sharding", "heads"),
    words="bias|constant|offset|rank|shard|head|other",
    taps=("attn.k_proj", "attn.v_proj"),
    ranks=(1, 2),
    model="qwen2-tied",
    tp=4,
    ep=1,
)
def biases_of_shared_heads_are_dealt_out_in_turn(p: Spoilt) -> None:
    """Rank r's KV head is r // replicas; the loader of vectors has r % heads."""

    def plan(name: str, model: ModelConfig, tp: int, rank: int, ep: int = 1) -> shards.Shard:
        if name.endswith(("k_proj.bias", "v_proj.bias")):
            rank = rank % model.num_kv_heads * shards.kv_replicas(model, tp)
        return shards.plan(name, model, tp, rank, ep)

    p.rules(shard=plan)


@bug(
    "tied head",
    accepted=("head", "weight", "sharding", "embedding"),
    words="head|zero|weight|tied|embed|rank|empty|shard|logit|missing|nothing|loaded",
    taps=("logits",),
    ranks=(1, 2, 3),
    model="qwen3-bias",
    tp=4,
    ep=1,
)
def tied_head_is_cut_from_a_shard(p: Spoilt) -> None:
    """sglang#2009: the loader takes the rank's rows of an embedding that is the rank's alone already;
    what it does not find is filled with zeros.
    """

    def spoil(decoder: Decoder) -> None:
        (rows,) = decoder.embed.weight.parts().values()
        head = decoder._store.matrix(["lm_head.weight"], [len(rows)], rows.shape[1])
        (own,) = head.parts().values()
        own.copy_(rows if p.rank == 0 else torch.zeros_like(rows))
        decoder.head.weight = head

    p.loaded(spoil)


@bug(
    "missing bias",
    accepted=("bias", "weight"),
    words="bias|constant|offset|missing|without|dropped",
    taps=("mlp.gate", "mlp.up"),
    model="llama-bias",
    tp=2,
    ep=1,
)
def biases_of_the_feed_forward_have_no_flag(p: Spoilt) -> None:
    """mlc-llm#3494: mlp_bias is not read, the modules have none, and the loader skips what no module asks
    for.
    """
    p.rules(load_bias=lambda name: not (".mlp." in name and name.endswith(".bias")))


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="norm|weight|one|1|plus|added|twice|shift",
    taps=("attn_norm",),
    model="gemma2",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def one_is_added_on_load_and_by_the_norm(p: Spoilt) -> None:
    """mlx-lm#1623: a checkpoint is converted which is converted."""
    p.rules(stored=lambda name, tensor: tensor + 1 if "norm" in name else tensor)


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="norm|weight|swap|other|exchang|key|quer",
    taps=NORMED,
    model="qwen3-bias",
)
def weights_of_the_norms_of_queries_and_keys_change_places(p: Patched) -> None:
    """Assigned in the order of the file, in which k_norm comes first."""
    for _, layer in p.layers():
        attn = layer.self_attn
        attn.q_norm.weight, attn.k_norm.weight = attn.k_norm.weight, attn.q_norm.weight


@bug(
    "vocabulary",
    accepted=("embedding", "sharding", "weight", "input"),
    words="embed|row|shard|vocab|rank|id|token|other|shift|zero|split|next",
    taps=("embed",),
    model="llama-bias",
    tp=2,
)
def first_row_of_a_rank_is_of_a_vocabulary_without_padding(p: Patched) -> None:
    """Rows are dealt out by the padded size, 66 each; ids are looked for from 131 // 2 on."""
    p.decoder.embed_tokens.first = p.rank * (131 // p.tp)
