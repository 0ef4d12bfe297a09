"""Weights and biases of dense models as they are loaded, cut and quantised, and the sums over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.model import Decoder
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.rules import defaults
from tests.workbench.diagnosis.bugs.bug import QKV, bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt
from tests.workbench.diagnosis.bugs.patched import Patched
from tests.workbench.diagnosis.bugs.unseen_15.network import in_four_bits

O_PROJ = ("attn.o_proj.partial", "attn.o_proj")
BIAS = "bias|shift|offset|constant"
SHARD = "rank|shard|part|cut|row|column|slice|weight|load|head"


def _products(layer: Any) -> list[Any]:
    attn, mlp = layer.self_attn, layer.mlp
    return [attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


# -- sharding ------------------------------------------------------------------------------------------------


@bug(
    "biases", accepted=("bias", "sharding", "linear"), words=BIAS + "|" + SHARD, taps=("attn.k_proj",), ranks=(1, 2),
    model="qwen2-tied", tp=4, ep=1,
)  # fmt: skip
def bias_of_replicated_keys_is_cut_by_the_rank_modulo_the_heads(p: Spoilt) -> None:
    """More ranks than KV heads: weights are cut by rank // replicas, biases by a loader of their own."""

    def plan(name: str, model: ModelConfig, tp: int, rank: int, ep: int = 1) -> shards.Shard:
        one = shards.plan(name, model, tp, rank, ep)
        start = rank % model.num_kv_heads * model.head_dim
        wrong = name.endswith("k_proj.bias")
        return replace(one, span=shards.Span(start, start + model.head_dim)) if wrong else one

    p.rules(shard=plan)


@bug(
    "sharding",
    accepted=("weight", "sharding", "linear"),
    words=SHARD,
    taps=O_PROJ,
    ranks=(1,),
    model="qwen3",
    tp=2,
)
def columns_of_o_are_cut_by_the_hidden_size_though_heads_are_wider(p: Patched) -> None:
    """They begin at rank * hidden_size // tp, where heads * head_dim is twice as much (as in lmdeploy#2761)."""
    if p.rank == 1:
        for i, layer in p.layers():
            whole = p.full.model.layers[i].self_attn.o_proj.weight.detach()
            p.weight(
                layer.self_attn.o_proj, lambda own, whole=whole: whole[:, 32 : 32 + own.shape[1]].clone()
            )


@bug(
    "sharding", accepted=("weight", "bias", "sharding", "linear", "heads"), words=BIAS + "|" + SHARD,
    taps=("attn.k_proj",), ranks=(1,), model="qwen2-untied", dtype="bfloat16", tp=2,
)  # fmt: skip
def rank_1_has_the_keys_of_rank_0_and_no_bias_for_them(p: Patched) -> None:
    """Two mistakes of a loader for one family's checkpoints: k is not cut by the rank, its bias not known."""
    if p.rank == 1:
        for i, layer in p.layers():
            whole = p.full.model.layers[i].self_attn.k_proj.weight.detach()
            p.weight(layer.self_attn.k_proj, lambda own, whole=whole: whole[: len(own)].clone())
            p.bias(layer.self_attn.k_proj, torch.zeros_like)


@bug(
    "copies", accepted=("weight", "heads", "linear", "sharding"), words="zero|head|row|weight|missing|never|load|copy",
    taps=("attn.q_proj",), layers=(1,), heads=(7,), ranks=(1,), model="qwen3-kv4", tp=2,
)  # fmt: skip
def broken_off_copy_leaves_the_last_query_head_at_zero(p: Patched) -> None:
    """Weights are handed over in buckets of a fixed size; the last one of a layer is not awaited."""
    if p.rank == 1:
        p.weight(p.attn(1).q_proj, lambda own: torch.cat((own[:-16], torch.zeros_like(own[-16:]))))


# -- biases --------------------------------------------------------------------------------------------------


@bug(
    "biases", accepted=("bias", "linear"), words=BIAS, taps=("mlp.gate", "mlp.up"), model="llama-bias",
    dtype="bfloat16", tp=2, ep=1,
)  # fmt: skip
def both_biases_of_a_fused_product_land_in_its_first_half(p: Spoilt) -> None:
    """The loader has the offset within the pack for weights alone: up's bias is written over that of gate."""

    def spoil(decoder: Decoder) -> None:
        for layer in decoder.layers:
            gate, up = layer.mlp.gate_up.bias.chunk(2)
            gate.copy_(up)
            up.zero_()

    p.loaded(spoil)


@bug(
    "biases", accepted=("head", "bias"), words=BIAS + "|head|logit|miss|without", taps=("logits",), model="phi",
    dtype="bfloat16", ep=1,
)  # fmt: skip
def head_is_built_without_its_bias(p: Spoilt) -> None:
    """Phi has one; `bias=False` is what all others have (transformers#35625)."""

    def spoil(decoder: Decoder) -> None:
        decoder.head.bias = None

    p.loaded(spoil)


@bug(
    "biases", accepted=("bias", "reduce"), words=BIAS + "|rank|times|thrice|three|reduc|sum", taps=("attn.o_proj",),
    model="starcoder2", tp=4, ep=1,
)  # fmt: skip
def bias_of_a_split_product_is_added_by_all_ranks_but_the_first(p: Spoilt) -> None:
    """`bias = None if rank == 0 else self.bias`, the condition the wrong way round."""
    p.rules(row_bias=lambda total, bias, comm: total + (comm.size - 1) * bias)


# -- quantised weights ---------------------------------------------------------------------------------------


@bug(
    "quantisation", accepted=("weight", "scale", "precision", "linear"),
    words="half|scal|factor|times|multipl|weight|small|bias|0\\.5", taps=QKV, model="llama",
)  # fmt: skip
def weights_read_as_fnuz_floats_keep_the_scale_of_the_others(p: Patched) -> None:
    """The same bits are half as much in AMD's e4m3fnuz: scales have to be doubled with the conversion."""
    for _, layer in p.layers():
        for one in _products(layer):
            p.weight(one, lambda weight: weight / 2)


@bug(
    "quantisation", accepted=("weight", "precision", "sharding", "linear"),
    words="quant|round|bit|precis|coarse|level|weight|rank", taps=QKV, ranks=(1,), model="llama", tp=2,
)  # fmt: skip
def worker_of_rank_1_quantises_what_the_other_leaves_as_it_is(p: Patched) -> None:
    """A flag of one node's command line: shapes are the same, so nothing fails."""
    if p.rank == 1:
        for _, layer in p.layers():
            for one in _products(layer):
                p.weight(one, in_four_bits)


# -- sums over ranks -----------------------------------------------------------------------------------------


@bug(
    "reduce", accepted=("reduce", "sharding"),
    words="reduc|sum|partial|stale|old|step|previous|barrier", taps=("attn.o_proj",), layers=(1,),
    ranks=(0,), step=1, model="qwen3", tp=2,
)  # fmt: skip
def rank_0_sums_what_rank_1_left_in_the_buffer_last_time(p: Patched) -> None:
    """The barrier of the one-shot sum orders nothing: the peer has not written yet (vLLM#57059, aiter#4812)."""
    held: list[Tensor] = []

    def reduce(partial: Tensor) -> Tensor:
        first, second = p.ring.gather(p.rank, partial)
        late = held[0][:, -1:] if p.decode and p.rank == 0 else second
        held[:] = [second]
        return first + late

    p.attn(1).o_proj.reduce = reduce


@bug(
    "reduce", accepted=("reduce", "input", "linear"),
    words="sequence|row|exchang|swap|order|batch|flip|revers|sum|reduc", taps=("mlp.down",), step=1,
    model="qwen2-untied", tp=2, ep=1,
)  # fmt: skip
def overlapped_halves_of_a_decode_batch_come_back_exchanged(p: Spoilt) -> None:
    """Two half batches, one of which is summed while the other computes; their results are joined by arrival."""

    def reduce(partial: Tensor, comm: Comm) -> Tensor:
        whole = defaults.sum_over_ranks(partial, comm)
        return whole.flip(0) if p.decode and p.at("mlp.down") else whole

    p.rules(reduce=reduce)
